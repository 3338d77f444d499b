"""`kvconv run`: generate text from a bundle, streamed to stdout."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvconv.cli.common import Command, needs_extra
from kvconv.cli.generation import generate
from kvconv.cli.sampling_options import sampling_options, sampling_params
from kvconv.errors import PromptError

_PIPE_CLOSED = 141  # 128 + SIGPIPE


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--chat-template", is_flag=True, help="Wrap the prompt as one user turn.")
@sampling_options
@click.option(
    "--max-sequence-length", type=click.IntRange(min=1), metavar="N",
    help="Most tokens in the cache, prompt included; default: what the model holds.",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1, 256), envvar="KVCONV_THREADS", show_envvar=True,
    metavar="N", help="Threads; default: one per core.",
)  # fmt: skip
@click.option(
    "--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    envvar="KVCONV_PROVIDER", show_envvar=True, help="Where to run.",
)  # fmt: skip
@click.option(
    "--use-bundle-library", is_flag=True,
    help="Run the op library inside the bundle: code from whoever made it.",
)  # fmt: skip
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
    with _stdout():
        with needs_extra("cpu"):
            from kvconv.runtime import Generator
        params = sampling_params(sampling)
        text = _read_stdin() if prompt == "-" else prompt
        generator = Generator.open(
            bundle,
            max_sequence_length=max_sequence_length,
            threads=threads,
            provider=provider,
            use_bundle_library=use_bundle_library,
        )
        prompt_ids = generator.encode(text, chat_template=chat_template)
        result = generate(generator, prompt_ids, params, _ignore if as_json else _show)
        if as_json:
            result.print_json(text, with_stats=stats)
        else:
            click.echo()
            if stats:
                result.print_stats()


@contextlib.contextmanager
def _stdout() -> Iterator[None]:
    """Let any text be written to stdout in the block, and end quietly when nobody reads on."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        yield
    except BrokenPipeError:
        # Whoever read the text has enough; Python must not try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(_PIPE_CLOSED) from None


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
