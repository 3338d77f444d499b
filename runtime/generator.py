"""Generation: prompts in, a stream of tokens and text out.

`Generator` drives one `Session`; each call of `generate` has its own cache, unless one is given,
and its own rows. Scheduling many requests is not done here; `plan_batches` cuts a list of prompts
into batches.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconv.manifest import Provider
from kvconv.plan import check_chunk, default_chunk
from kvconv.runtime.bundle import Bundle
from kvconv.runtime.capacity import (
    RowParams,
    check_fit,
    longest_prompt,
    needed_capacity,
    per_row,
)
from kvconv.runtime.chat_template import ChatTemplate, Message
from kvconv.runtime.flavour_check import check_chunks, check_prompts
from kvconv.runtime.kv_cache import KVCache
from kvconv.runtime.row import GenerationEvent, Row
from kvconv.runtime.sampling import SamplingParams
from kvconv.runtime.session import Session, check_max_sequence_length
from kvconv.runtime.tokenizer import Tokenizer

GREEDY = SamplingParams()

# Padding is masked, so any token does; models do not agree on one, and some have none.
_PADDING_ID = 0


class Generator:
    """Generates text from a bundle.

    Args:
        session: The loaded model.
        tokenizer: Of the same bundle.
        max_sequence_length: Most tokens, prompt and new, of a generation; None for the model's.
        prefill_chunk: Most tokens per row in one run of a prompt, >= 1; None for
            `kvconv.plan.default_chunk`.

    Raises:
        CacheFullError: max_sequence_length is more than the model holds, or prefill_chunk more
            than the bundle's rings take at once.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        *,
        max_sequence_length: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be at least 1")
        check_chunk(session.manifest.cache_layers, prefill_chunk)
        self.prefill_chunk = prefill_chunk
        self.session = session
        self.tokenizer = tokenizer
        manifest = session.manifest
        self.max_sequence_length = manifest.max_sequence_length
        self.has_chosen_length = max_sequence_length is not None
        if max_sequence_length is not None:
            check_max_sequence_length(manifest, max_sequence_length)
            self.max_sequence_length = max_sequence_length
        self._eos_token_ids = frozenset(manifest.eos_token_ids)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        max_sequence_length: int | None = None,
        threads: int | None = None,
        provider: Provider = "cpu",
        use_bundle_library: bool = False,
        prefill_chunk: int | None = None,
        spin: bool = True,
        cuda_graph: bool = True,
    ) -> "Generator":
        """Open a bundle and load its model.

        Args:
            path: The bundle.
            max_sequence_length: Most tokens, prompt and new; None for the model's.
            threads: See `Session`.
            provider: See `Session`.
            use_bundle_library: See `Session`.
            prefill_chunk: As for the class.
            spin: See `Session`.
            cuda_graph: See `Session`.

        Raises:
            BundleError: The bundle is missing or damaged.
            LibraryError: The op library is absent or does not suit.
            ProviderError: The provider is not available.
        """
        bundle = Bundle.open(path)
        tokenizer = Tokenizer.open(bundle)
        session = Session(
            bundle,
            threads=threads,
            provider=provider,
            use_bundle_library=use_bundle_library,
            spin=spin,
            cuda_graph=cuda_graph,
        )
        return cls(
            session,
            tokenizer,
            max_sequence_length=max_sequence_length,
            prefill_chunk=prefill_chunk,
        )

    def encode(self, prompt: str, *, chat_template: bool = False) -> list[int]:
        """Return a prompt's token ids.

        Args:
            prompt: Raw text, encoded with the special tokens that the model expects.
            chat_template: Wrap it as one user turn first.

        Raises:
            PromptError: The prompt cannot be encoded, or the bundle has no chat template.
        """
        if chat_template:
            return self.encode_chat([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(prompt)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The bundle's chat template; PromptError where it has none."""
        return ChatTemplate.open(self.session.bundle)

    def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the model answers.

        Args:
            messages: In order; each has `role` and `content`.
            variables: More names for the template, such as those of `ChatTemplate.thinking`.

        Raises:
            PromptError: The bundle has no chat template, or it refuses the conversation.
        """
        text = self.chat_template.render(messages, variables=variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self, prompt: str, params: SamplingParams = GREEDY, *, chat_template: bool = False
    ) -> Iterator[str]:
        """Yield the answer to one prompt, piece by piece.

        Args:
            prompt: Raw text, or what the user says.
            params: How to choose tokens and when to stop.
            chat_template: Wrap the prompt as one user turn.

        Raises:
            PromptError: The prompt is empty, or the bundle has no chat template.
            CacheFullError: The prompt does not fit.
        """
        events = self.generate([self.encode(prompt, chat_template=chat_template)], params)
        return (event.text for event in events if event.text)

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        params: RowParams = GREEDY,
    ) -> None:
        """Refuse prompts that `generate` would refuse; allocates and runs nothing.

        Args:
            prompts: Token ids per row.
            params: Say how many tokens may be added: the same for all rows, or one per row.

        Raises:
            FlavourError: The lengths differ, and the bundle's flavour takes no padding; or it takes
                no chunks, and prefill_chunk asks for them.
            PromptError: A prompt is empty.
            CacheFullError: The longest prompt leaves no room for a token.
            MemoryError: The machine has less memory than the full cache takes.
        """
        check_prompts(self.session.manifest.attention, prompts)
        self.chunk_tokens(len(prompts), longest_prompt(prompts))
        capacity = needed_capacity(prompts, params, self.max_sequence_length)
        self.session.check_cache(len(prompts), capacity, prefill_chunk=self.prefill_chunk)

    def new_cache(self, prompts: Sequence[Sequence[int]], params: RowParams = GREEDY) -> KVCache:
        """Make a cache as large as a generation needs, within max_sequence_length.

        Args:
            prompts: As for `check`.
            params: As for `check`.

        Raises:
            PromptError: A prompt is empty.
            CacheFullError: The longest prompt leaves no room for a token.
            MemoryError: The machine has less memory than the full cache takes.
        """
        capacity = needed_capacity(prompts, params, self.max_sequence_length)
        return self.session.new_cache(len(prompts), capacity, prefill_chunk=self.prefill_chunk)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: RowParams = GREEDY,
        *,
        cache: KVCache | None = None,
    ) -> Iterator[GenerationEvent]:
        """Generate for all prompts at once, and yield one event per new token.

        A batch gives each row the tokens that the row alone would get, whatever the other rows
        are; shorter prompts are padded on the left, which takes cache slots.

        Args:
            prompts: Token ids per row, one row or more.
            params: How to choose tokens and when to stop: the same for all rows (a seed then gives
                equal prompts equal draws), or one per row.
            cache: Empty, of as many rows; None for one of `new_cache`. A single row's cache may
                hold the beginning of its prompt, which is not run again. It keeps all tokens that
                were run, which is every token but the last.

        Raises:
            PromptError: A prompt is empty.
            CacheFullError: The longest prompt leaves no room for a token; nothing has run.
            FlavourError: As for `check`.
        """
        check_prompts(self.session.manifest.attention, prompts)
        if cache is None:
            cache = self.new_cache(prompts, params)
        longest = longest_prompt(prompts)
        most_cached = longest - 1 if len(prompts) == 1 else 0
        if cache.length > most_cached or cache.batch_size != len(prompts):
            raise ValueError(
                f"The cache holds {cache.length} tokens of {cache.batch_size} rows; it must have "
                f"{len(prompts)} rows and at most {most_cached} tokens of the prompt"
            )
        check_fit(longest, cache.capacity)
        self.chunk_tokens(len(prompts), longest - cache.length)
        room = cache.capacity - longest
        pairs = zip(prompts, per_row(params, len(prompts)), strict=True)
        rows = [
            Row(i, prompt, row_params, room, self.tokenizer, self._eos_token_ids)
            for i, (prompt, row_params) in enumerate(pairs)
        ]
        return self._generate(rows, cache, longest)

    def prefill(
        self,
        cache: KVCache,
        input_ids: npt.NDArray[np.int64],
        attention_mask: npt.NDArray[np.int64] | None = None,
        *,
        prefill_chunk: int | None = None,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Run prompts in chunks and return the logits of their last tokens.

        Args:
            cache: Grows by sequence_length.
            input_ids: [batch_size, sequence_length].
            attention_mask: [batch_size, cache.length + sequence_length or wider]; None for ones.
            prefill_chunk: Most tokens per row in one run, >= 1; None for the generator's.
            out: [batch_size, 1, vocab_size] to write into; None for a new array.

        Returns:
            [batch_size, 1, vocab_size] float32.

        Raises:
            CacheFullError: The prompts do not fit; nothing has run.
            FlavourError: The flavour takes no such chunks; nothing has run.
        """
        cache.check_room(input_ids.shape[1])
        chunk_tokens = self.chunk_tokens(cache.batch_size, input_ids.shape[1], prefill_chunk)
        logits = self._run(cache, input_ids[:, :chunk_tokens], attention_mask, out)
        for start in range(chunk_tokens, input_ids.shape[1], chunk_tokens):
            chunk = input_ids[:, start : start + chunk_tokens]
            logits = self._run(cache, chunk, attention_mask, logits)
        return logits

    def chunk_tokens(self, batch_size: int, new_tokens: int, wanted: int | None = None) -> int:
        """Return how many tokens per row the runs of a prefill take.

        Args:
            batch_size: Rows that run together.
            new_tokens: Tokens per row.
            wanted: Instead of `prefill_chunk`.

        Raises:
            FlavourError: The flavour takes no chunks, and `wanted` or `prefill_chunk` asks for
                them.
            CacheFullError: `wanted` is more than the bundle's rings take at once.
        """
        attention = self.session.manifest.attention
        cache_layers = self.session.manifest.cache_layers
        wanted = wanted or self.prefill_chunk
        if wanted is not None:
            check_chunk(cache_layers, wanted)
            check_chunks(attention, batch_size, new_tokens, wanted)
            return wanted
        return default_chunk(attention, batch_size, new_tokens, cache_layers=cache_layers)

    def _run(
        self,
        cache: KVCache,
        input_ids: npt.NDArray[np.int64],
        attention_mask: npt.NDArray[np.int64] | None,
        out: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        total = cache.length + input_ids.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :total]
        return self.session.run(cache, input_ids, attention_mask=mask, out=out)

    def _generate(self, rows: list[Row], cache: KVCache, longest: int) -> Iterator[GenerationEvent]:
        # 1. Pad on the left, so that all prompts end in the same slot.
        input_ids = np.full((len(rows), longest), _PADDING_ID, np.int64)
        mask = np.ones((len(rows), cache.capacity), np.int64)
        for row in rows:
            padding = longest - len(row.token_ids)
            input_ids[row.index, padding:] = row.token_ids
            mask[row.index, :padding] = 0
        # 2. Run what is not cached of the prompts; these logits' memory serves every step.
        logits = self.prefill(cache, input_ids[:, cache.length :], mask)
        token_ids = [_PADDING_ID] * len(rows)
        step = self.session.decode_step(cache, mask, logits)
        while True:
            # 3. Choose a token for each row that goes on; the others are fed padding.
            for row in rows:
                event = row.step(logits[row.index, -1])
                is_done = event.finish_reason is not None
                token_ids[row.index] = _PADDING_ID if is_done else event.token_id
                yield event
            rows = [row for row in rows if row.finish_reason is None]
            if not rows:
                return
            # 4. Run the chosen tokens.
            step.run(token_ids)
