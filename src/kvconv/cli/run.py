"""`kvconv run`: generate text from a bundle, streamed to stdout."""

import io
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvconv.cli.common import Command, needs_extra, print_json, print_status
from kvconv.errors import PromptError
from kvconv.memory import peak_rss_mb

if TYPE_CHECKING:
    from kvconv.runtime import Generator, SamplingParams

_PIPE_CLOSED = 141  # 128 + SIGPIPE


@dataclass(frozen=True, slots=True)
class RunStats:
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
class RunResult:
    """One generation: the JSON line, and the speed of its two phases in tokens/s."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stats: RunStats
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--chat-template", is_flag=True, help="Wrap the prompt as one user turn.")
@click.option(
    "--max-new-tokens",
    type=int,
    default=256,
    show_default=True,
    metavar="N",
    help="Most tokens to add.",
)
@click.option(
    "--temperature",
    type=float,
    default=0.0,
    show_default=True,
    metavar="T",
    help="0 takes the most likely token; higher is more random.",
)
@click.option(
    "--top-k",
    type=int,
    default=0,
    show_default=True,
    metavar="K",
    help="Keep the K most likely tokens; 0 keeps all.",
)
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    metavar="P",
    help="Keep the most likely tokens that add up to P; 1 keeps all.",
)
@click.option(
    "--min-p",
    type=float,
    default=0.0,
    show_default=True,
    metavar="P",
    help="Keep tokens at least P times as likely as the most likely; 0 keeps all.",
)
@click.option(
    "--repetition-penalty",
    type=float,
    default=1.0,
    show_default=True,
    metavar="R",
    help="Above 1 makes tokens that occurred less likely.",
)
@click.option("--seed", type=int, metavar="N", help="Make random draws repeatable.")
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="End before this text; may be given several times.",
)
@click.option(
    "--max-sequence-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most tokens in the cache, prompt included; default: what the model holds.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    envvar="KVCONV_THREADS",
    metavar="N",
    show_envvar=True,
    help="Threads; default: one per core.",
)
@click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    envvar="KVCONV_PROVIDER",
    show_envvar=True,
    help="Where to run.",
)
@click.option(
    "--use-bundle-library",
    is_flag=True,
    help="Run the op library inside the bundle: code from whoever made it.",
)
@click.option("--stats", is_flag=True, help="Print speed and memory to stderr (or into the JSON).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of streaming.")
def command(
    bundle: Path,
    prompt: str,
    chat_template: bool,
    max_sequence_length: int | None,
    threads: int | None,
    provider: Any,
    use_bundle_library: bool,
    stats: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text that continues PROMPT, with the model in BUNDLE.

    PROMPT is raw text; '-' reads it from standard input, less one final newline. Text streams to
    stdout, everything else goes to stderr.

    \b
    kvconv run smollm2 "What is the capital of France?" --chat-template
    kvconv run smollm2 - --temperature 0.7 --top-p 0.9 --seed 1 < prompt.txt
    """  # noqa: D301 - click wants the control character that \b stands for
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        with needs_extra("cpu"):
            from kvconv.runtime import Generator, SamplingParams
        try:
            params = SamplingParams(**sampling)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        text = _read_stdin() if prompt == "-" else prompt
        generator = Generator.open(
            bundle,
            max_sequence_length=max_sequence_length,
            threads=threads,
            provider=provider,
            use_bundle_library=use_bundle_library,
        )
        show = _ignore if as_json else _show
        result = _generate(generator, text, params, chat_template, show)
        if as_json:
            _print_result(text, result, stats)
        else:
            click.echo()
            if stats:
                _print_stats(result)
    except BrokenPipeError:
        # Whoever read the text has enough; Python must not try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(_PIPE_CLOSED) from None


def _generate(
    generator: "Generator",
    prompt: str,
    params: "SamplingParams",
    chat_template: bool,
    show: Callable[[str], None],
) -> RunResult:
    """Generate to the end, showing each piece of text as it comes."""
    prompt_ids = generator.encode(prompt, chat_template=chat_template)
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
    return RunResult(
        text="".join(pieces),
        token_ids=token_ids,
        finish_reason=finish_reason,
        stats=RunStats(
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


def _print_result(prompt: str, result: RunResult, with_stats: bool) -> None:
    document: dict[str, Any] = {
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
    }
    if with_stats:
        document["stats"] = asdict(result.stats)
    print_json(document)


def _print_stats(result: RunResult) -> None:
    stats = result.stats
    print_status(
        f"prompt: {stats.prompt_tokens} tokens, {result.prefill_tokens_per_s:.1f} tokens/s | "
        f"new: {stats.new_tokens} tokens, {result.decode_tokens_per_s:.1f} tokens/s | "
        f"{stats.seconds:.2f} s"
    )
    memory = "unknown" if stats.peak_rss_mb is None else f"{stats.peak_rss_mb:.0f} MB"
    print_status(f"kv_cache_bytes: {stats.kv_cache_bytes} | peak RSS: {memory}")


def _read_stdin() -> str:
    """Return standard input without the newline that ends a file's last line."""
    if sys.stdin is None:
        raise PromptError("There is no standard input to read. Give the prompt as an argument.")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"Standard input is not UTF-8 ({error}). Convert it to UTF-8 first."
        ) from error


def _show(text: str) -> None:
    if text:
        click.echo(text, nl=False)


def _ignore(text: str) -> None:
    """Show nothing: the JSON line has the text."""
