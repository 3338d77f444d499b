"""What all commands share: errors become one line, results become text or JSON."""

import codecs
import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvconv.errors import KvconvError, MissingDependencyError
from kvconv.manifest import RING_SLACK
from kvconv.plan import PREFILL_CHUNK_TOKENS

_PIPE_CLOSED = 141  # 128 and SIGPIPE's number

_REMEDIES = {
    errno.ENOSPC: "Free some space there, or choose another place.",
    errno.EACCES: "Change its permissions, or choose another place.",
    errno.EPERM: "Change its permissions, or choose another place.",
    errno.EROFS: "It is on a read-only file system: choose another place.",
}


HUB_CACHE_VARIABLE = "KVCONV_CACHE_DIR"

# Options of several commands, so that they read alike.
revision_option = click.option("--revision", help="Branch, tag or commit of a hub model.")
cache_dir_option = click.option(
    "--cache-dir", type=click.Path(path_type=Path), envvar=HUB_CACHE_VARIABLE, show_envvar=True,
    help="Where hub files are kept. [default: Hugging Face's cache]",
)  # fmt: skip
trust_remote_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that the model brings."
)


prefill_chunk_option = click.option(
    "--prefill-chunk", type=click.IntRange(min=1), metavar="N",
    help="Tokens of a prompt that run at once: more take more memory. Changes results by "
    f"rounding alone. [default: {PREFILL_CHUNK_TOKENS}; {RING_SLACK}, and no more, with rings; "
    "whole prompts in batches of a gqa bundle]",
)  # fmt: skip
spin_option = click.option(
    "--spin/--no-spin", default=True, show_default=True, envvar="KVCONV_SPIN", show_envvar=True,
    help="Let threads spin while they wait for work: fastest while cores are free, and half as "
    "fast where other programs keep them busy.",
)  # fmt: skip


provider_option = click.option(
    "--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    envvar="KVCONV_PROVIDER", show_envvar=True, help="Where to run.",
)  # fmt: skip
cuda_graph_option = click.option(
    "--cuda-graph/--no-cuda-graph", default=True, show_default=True,
    help="On CUDA, capture a decode step and launch it as one; takes a model whose operators all "
    "run there.",
)  # fmt: skip


class Command(click.Command):
    """A command with --debug, whose errors for a person end as one line and exit code 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--debug"], is_flag=True, expose_value=False, is_eager=True,
                callback=_remember_debug, help="Show the traceback of an error.",
            )
        )  # fmt: skip

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn what a person can mend into one line on stderr."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Whoever read the results has enough; Python must not try to flush the rest at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(_PIPE_CLOSED) from None
        except (KvconvError, OSError, MemoryError) as error:
            if ctx.meta.get("kvconv.debug"):
                raise
            raise click.ClickException(one_line(error)) from error


class Dtype(click.Choice[str]):
    """The dtypes that work, and why the one that many checkpoints have does not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the dtype, or refuse it with the reason."""
        if value == "bfloat16":
            self.fail(
                "bfloat16 activations need CUDA, where kvconv exports float16: ONNX Runtime's CPU "
                "provider has no bfloat16 MatMul, so that nothing could verify them. Use float32 "
                "or float16; bfloat16 checkpoints are converted.",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a failed import of an optional package into the command that installs it.

    Args:
        extra: The extra of kvconv that brings what the block imports.

    Raises:
        MissingDependencyError: A package of one of kvconv's extras is not installed.
        KvconvError: Another one is not installed: what a model's own code imports.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "kvconv"):
            raise
        if package.replace("_", "-") in {name for names in extras().values() for name in names}:
            raise MissingDependencyError(package=package, extra=extra) from error
        raise KvconvError(
            f"The package {package!r} is not installed, and the model's own code needs it. "
            f"Install it with: pip install {package}"
        ) from error


def extras() -> dict[str, tuple[str, ...]]:
    """Return the packages that each extra of kvconv brings, as the installation says."""
    import importlib.metadata  # 20 ms, and needed for errors only

    found: dict[str, tuple[str, ...]] = {}
    for requirement in importlib.metadata.requires("kvconv") or ():
        extra = re.search(r"""extra == ['"](\w+)['"]""", requirement)
        package = re.match(r"[\w.-]+", requirement)
        if extra and package:
            found[extra[1]] = (*found.get(extra[1], ()), package[0])
    return found


def print_json(value: Any) -> None:
    """Write one JSON line to stdout; where that is not UTF-8, other characters are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    click.echo(json.dumps(value, ensure_ascii=not is_utf8))


def require_stdout() -> None:
    """Refuse to compute what nobody would see.

    Raises:
        KvconvError: There is no stdout.
    """
    if sys.stdout is None:
        raise KvconvError(
            "Standard output is closed, so the results would be lost. Redirect it, to /dev/null "
            "if nobody reads it."
        )


def print_status(message: str) -> None:
    """Write one line about progress to stderr; stdout carries results only."""
    if sys.stderr is not None:  # closed by whoever started us; print() would take stdout instead
        print(message, file=sys.stderr, flush=True)  # noqa: T201


def _remember_debug(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    ctx.meta["kvconv.debug"] = value


def one_line(error: Exception) -> str:
    """Return what an error for a person says, as one line."""
    if isinstance(error, MemoryError) and not isinstance(error, KvconvError):
        return f"Not enough memory: {error}. Close other programs or choose a smaller model."
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        remedy = _REMEDIES.get(error.errno, "")
        return f"{where}{error.strerror}. {remedy}".strip()
    return " ".join(str(error).split())
