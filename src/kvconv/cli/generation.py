"""Answers of `kvconv run`: gathered from their events, timed, and printed."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from kvconv.cli.common import print_json, print_status
from kvconv.memory import peak_rss_mb

if TYPE_CHECKING:
    from kvconv.runtime import GenerationEvent, Generator, SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """All events of one row.

    Attributes:
        text: What was generated, special tokens left out.
        token_ids: Tokens generated, the EOS token included.
        finish_reason: Why it ended; None where it was cut short.
        first_s: Seconds to the first token.
        rest_s: Seconds from there to the last one.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    first_s: float
    rest_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first; 0 where there are none."""
        num_decoded = len(self.token_ids) - 1
        return num_decoded / self.rest_s if num_decoded > 0 else 0.0

    def print_json(self, prompt: str, stats: Any = None) -> None:
        """Write the answer as a JSON line to stdout, with a dataclass of statistics if given."""
        document: dict[str, Any] = {
            "prompt": prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
        }
        print_json(document if stats is None else document | {"stats": asdict(stats)})


def gather(events: Iterable["GenerationEvent"], *, is_streamed: bool) -> Answer:
    """Take all events of one row; `is_streamed` writes each piece of text to stdout as it comes."""
    pieces: list[str] = []
    token_ids: list[int] = []
    finish_reason = None
    started = first = time.perf_counter()
    for event in events:
        if not token_ids:
            first = time.perf_counter()
        token_ids.append(event.token_id)
        pieces.append(event.text)
        finish_reason = event.finish_reason
        if event.text and is_streamed:
            click.echo(event.text, nl=False)
    rest_s = time.perf_counter() - first
    return Answer("".join(pieces), token_ids, finish_reason, first - started, rest_s)


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one generation took.

    Attributes:
        prompt_tokens: Tokens of the prompt, special ones included.
        new_tokens: Tokens generated, the EOS token included.
        seconds: From the encoded prompt to the last token; loading the model is not counted.
        tokens_per_s: new_tokens / seconds.
        kv_cache_bytes: Bytes of the cache at the end.
        peak_rss_mb: Most memory the process held, in MB (10^6 bytes); None where it is unknown.
    """

    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_s: float
    kv_cache_bytes: int
    peak_rss_mb: float | None


def generate(
    generator: "Generator",
    prompt_ids: Sequence[int],
    params: "SamplingParams",
    *,
    is_streamed: bool,
) -> tuple[Answer, GenerationStats]:
    """Answer one prompt; see `gather`.

    Raises:
        PromptError: The prompt is empty.
        CacheFullError: It does not fit.
    """
    cache = generator.new_cache([prompt_ids], params)
    answer = gather(generator.generate([prompt_ids], params, cache=cache), is_streamed=is_streamed)
    seconds = answer.first_s + answer.rest_s
    return answer, GenerationStats(
        prompt_tokens=len(prompt_ids),
        new_tokens=len(answer.token_ids),
        seconds=seconds,
        tokens_per_s=len(answer.token_ids) / seconds,
        kv_cache_bytes=cache.nbytes,
        peak_rss_mb=peak_rss_mb(),
    )


def print_stats(answer: Answer, stats: GenerationStats) -> None:
    """Write speed and memory of a generation to stderr."""
    print_status(
        f"prompt: {stats.prompt_tokens} tokens, {stats.prompt_tokens / answer.first_s:.1f} tokens/s"
        f" | new: {stats.new_tokens} tokens, {answer.decode_tokens_per_s:.1f} tokens/s | "
        f"{stats.seconds:.2f} s"
    )
    print_memory(stats.kv_cache_bytes)


def print_memory(kv_cache_bytes: int) -> None:
    """Write the last line of `--stats` to stderr."""
    peak = peak_rss_mb()
    memory = "unknown" if peak is None else f"{peak:.0f} MB"
    print_status(f"kv_cache_bytes: {kv_cache_bytes} | peak RSS: {memory}")
