"""One row of a generation: its tokens, how the next is chosen, and the text they give.

Rows share nothing, so each can be sampled and ended in its own way.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvconv.runtime.sampling import Sampler, SamplingParams
from kvconv.runtime.stop_strings import StopFilter
from kvconv.runtime.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["eos", "stop", "length"]


class GenerationEvent(NamedTuple):
    """One new token of one row.

    Attributes:
        row: Index of the prompt.
        token_id: The token, EOS and the tokens of a stop string included.
        text: What can be shown now; often empty, because characters and possible stop strings are
            held back until they are whole.
        finish_reason: On the row's last event: `eos`, `stop` (a stop string) or `length`
            (max_new_tokens, or the cache is full); None before.
    """

    row: int
    token_id: int
    text: str
    finish_reason: FinishReason | None


class Row:
    """One sequence of a generation: its tokens, its sampler and its text.

    Args:
        index: Of the prompt in its batch; says which events are this row's, and nothing else.
        prompt: Token ids, without padding.
        params: How this row's tokens are chosen and when it stops.
        room: Cache slots for new tokens, >= 1.
        tokenizer: Of the model.
        eos_token_ids: Ids that end the row.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        room: int,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.index = index
        self.token_ids = list(prompt)
        self.finish_reason: FinishReason | None = None
        self._max_length = len(prompt) + min(params.max_new_tokens, room)
        self._sampler = Sampler(params)
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_filter = StopFilter(params.stop)
        self._eos_token_ids = eos_token_ids

    def step(self, logits: npt.NDArray[np.float32]) -> GenerationEvent:
        """Choose the next token from [vocab_size] logits, and take it."""
        token_id = self._sampler(self.token_ids, logits)
        self.token_ids.append(token_id)
        if token_id in self._eos_token_ids:
            self.finish_reason = "eos"
            piece = ""
        else:
            piece = self._detokenizer.push(token_id)
            if len(self.token_ids) == self._max_length:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self._detokenizer.flush()
        text, is_stopped = self._stop_filter.push(piece)
        if is_stopped:
            self.finish_reason = "stop"
        elif self.finish_reason is not None:
            text += self._stop_filter.flush()
        return GenerationEvent(self.index, token_id, text, self.finish_reason)
