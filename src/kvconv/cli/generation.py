"""One generation of `kvconv run`: driven to its end, timed, and printed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvconv.cli.common import print_json, print_status
from kvconv.memory import peak_rss_mb

if TYPE_CHECKING:
    from kvconv.runtime import Generator, SamplingParams


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


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished generation: the JSON line, and the speed of its two phases in tokens/s."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stats: GenerationStats
    prefill_tokens_per_s: float
    decode_tokens_per_s: float

    def print_json(self, prompt: str, *, with_stats: bool) -> None:
        """Write the JSON line to stdout."""
        document: dict[str, Any] = {
            "prompt": prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
        }
        if with_stats:
            document["stats"] = asdict(self.stats)
        print_json(document)

    def print_stats(self) -> None:
        """Write speed and memory to stderr."""
        stats = self.stats
        print_status(
            f"prompt: {stats.prompt_tokens} tokens, {self.prefill_tokens_per_s:.1f} tokens/s | "
            f"new: {stats.new_tokens} tokens, {self.decode_tokens_per_s:.1f} tokens/s | "
            f"{stats.seconds:.2f} s"
        )
        print_memory(stats.kv_cache_bytes)


def generate(
    generator: "Generator",
    prompt_ids: Sequence[int],
    params: "SamplingParams",
    show: Callable[[str], None],
) -> Generation:
    """Generate to the end, showing each piece of text as it comes.

    Raises:
        PromptError: The prompt is empty.
        CacheFullError: It does not fit.
    """
    cache = generator.new_cache([prompt_ids], params)
    pieces: list[str] = []
    token_ids: list[int] = []
    finish_reason = None
    started = first = time.perf_counter()
    for event in generator.generate([prompt_ids], params, cache=cache):
        if not token_ids:
            first = time.perf_counter()
        token_ids.append(event.token_id)
        pieces.append(event.text)
        finish_reason = event.finish_reason
        show(event.text)
    ended = time.perf_counter()
    return Generation(
        text="".join(pieces),
        token_ids=token_ids,
        finish_reason=finish_reason,
        stats=GenerationStats(
            prompt_tokens=len(prompt_ids),
            new_tokens=len(token_ids),
            seconds=ended - started,
            tokens_per_s=len(token_ids) / (ended - started),
            kv_cache_bytes=cache.nbytes,
            peak_rss_mb=peak_rss_mb(),
        ),
        prefill_tokens_per_s=len(prompt_ids) / (first - started),
        decode_tokens_per_s=(len(token_ids) - 1) / (ended - first) if len(token_ids) > 1 else 0.0,
    )


def print_memory(kv_cache_bytes: int) -> None:
    """Write the last line of `--stats` to stderr."""
    peak = peak_rss_mb()
    memory = "unknown" if peak is None else f"{peak:.0f} MB"
    print_status(f"kv_cache_bytes: {kv_cache_bytes} | peak RSS: {memory}")
