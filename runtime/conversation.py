"""A conversation: turns that share one KV cache.

Each turn renders the whole history with the model's own chat template, as a fresh prompt would, so
templates that change earlier turns are followed. Of its tokens, those that begin like what is in
the cache are kept and the others run; the answer is that of a fresh prompt. Where a model chose
other tokens than its tokenizer makes of the same text, the rest of that answer runs once more.
"""

from collections.abc import Generator as Events
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvconv.errors import CacheFullError
from kvconv.plan import DEFAULT_CONVERSATION_TOKENS
from kvconv.runtime.chat_template import Message
from kvconv.runtime.generator import GREEDY, Generator
from kvconv.runtime.row import GenerationEvent
from kvconv.runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn's prompt is made of.

    Attributes:
        prompt_tokens: Tokens of the whole history, up to where the answer begins.
        cached_tokens: Those of them that were in the cache; the others were run.
    """

    prompt_tokens: int
    cached_tokens: int


class Conversation:
    """A conversation with a model.

    An answer is remembered as the text that was shown, so a model whose answers are built of
    special tokens (channels, tool calls) loses those in its history.

    Args:
        generator: Whose bundle has a chat template. Its max_sequence_length is the most tokens of
            the conversation; where none was chosen, 8192 or what the model holds.
        messages: What was said before, a system message in front if there is one.
        variables: More names for the template, such as those of `ChatTemplate.thinking`.

    Attributes:
        messages: All that was said, `role` and `content` each; may be changed between turns.
        turn: Of the last call of `say`; None before.

    Raises:
        PromptError: The bundle has no chat template, or one that does not compile.
        MemoryError: The machine has less memory than the full cache takes.
    """

    def __init__(
        self,
        generator: Generator,
        messages: Sequence[Message] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.turn: Turn | None = None
        self._generator = generator
        self._variables = dict(variables or {})
        generator.chat_template  # noqa: B018 - a bundle without one is refused now
        capacity = generator.max_sequence_length
        if not generator.has_chosen_length:
            capacity = min(capacity, DEFAULT_CONVERSATION_TOKENS)
        self._cache = generator.session.new_cache(
            1, capacity, prefill_chunk=generator.prefill_chunk
        )
        # What is in the cache and more: a token is noted before it is run, so that
        # `_ids[: self._cache.length]` is true whenever a turn is interrupted.
        self._ids: list[int] = []
        self._events: Events[GenerationEvent] | None = None

    def say(self, text: str, params: SamplingParams = GREEDY) -> Events[GenerationEvent]:
        """Say something as the user, and yield the events of the answer.

        The turn enters `messages` with the first event. An answer that is closed early, or fails,
        stays there as far as it was yielded; without any text the turn is taken back. The next
        call closes an answer that is still open.

        Args:
            text: What the user says.
            params: How to choose tokens and when to stop. Penalties count the whole history.

        Raises:
            PromptError: The template refuses the conversation.
            CacheFullError: The history leaves no room for an answer.
        """
        if self._events is not None:
            self._events.close()
        prompt_ids = self.encode([*self.messages, {"role": "user", "content": text}])
        cached = self._ids[: self._cache.length]
        # The prompt's last token runs in any case: its logits are needed.
        num_cached = _common_length(cached, prompt_ids[:-1])
        if num_cached < self._cache.shortest_rewind:
            num_cached = 0  # rings have overwritten what the kept tokens saw: all runs anew
        self.turn = Turn(len(prompt_ids), num_cached)
        self._events = self._answer(text, prompt_ids, params, num_cached)
        return self._events

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of messages, up to where the model answers.

        Raises:
            PromptError: The template refuses them.
            CacheFullError: They leave no room for an answer.
        """
        prompt_ids = self._generator.encode_chat(messages, self._variables)
        if len(prompt_ids) >= self._cache.capacity:
            raise CacheFullError(
                f"The conversation would have {len(prompt_ids)} tokens and one more must fit, but "
                f"the cache holds {self._cache.capacity}; nothing was added. Undo some turns or "
                f"reset the conversation, or raise --max-sequence-length (at most what the "
                f"model was exported for).",
                needed=len(prompt_ids) + 1,
                capacity=self._cache.capacity,
            )
        return prompt_ids

    def undo(self) -> bool:
        """Take back what the user said last and the answer; returns whether there was a turn."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if users:
            del self.messages[users[-1] :]
        return bool(users)

    def reset(self) -> None:
        """Forget all turns; a system message in front stays."""
        del self.messages[self._num_system() :]

    def set_system(self, text: str) -> None:
        """Replace the system message in front, or put one there; an empty text removes it."""
        message = {"role": "system", "content": text}
        self.messages[: self._num_system()] = [message] if text else []

    def _num_system(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def _answer(
        self, text: str, prompt_ids: list[int], params: SamplingParams, num_cached: int
    ) -> Events[GenerationEvent]:
        self._cache.rewind(num_cached)
        self._ids = list(prompt_ids)
        answer = {"role": "assistant", "content": ""}
        self.messages += [{"role": "user", "content": text}, answer]
        is_finished = False
        try:
            for event in self._generator.generate([prompt_ids], params, cache=self._cache):
                self._ids.append(event.token_id)
                answer["content"] += event.text
                is_finished = event.finish_reason is not None
                yield event
        finally:
            is_last = bool(self.messages) and self.messages[-1] is answer
            if is_last and not is_finished and not answer["content"]:
                del self.messages[-2:]


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many items two sequences begin with in common."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
