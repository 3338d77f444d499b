"""What all commands share: errors become one line, results become text or JSON."""

import contextlib
import errno
import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from kvconv.errors import KvconvError, MissingDependencyError

_REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space, or choose a folder on another disk.",
    errno.EACCES: "No permission: choose a folder that you may write to.",
    errno.EPERM: "No permission: choose a folder that you may write to.",
    errno.EROFS: "The file system is read-only: choose another folder.",
}


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
        except (KvconvError, OSError, MemoryError) as error:
            if ctx.meta.get("kvconv.debug"):
                raise
            raise click.ClickException(_one_line(error)) from error


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a failed import of an optional package into the command that installs it.

    Args:
        extra: The extra of kvconv that brings what the block imports.

    Raises:
        MissingDependencyError: A third-party package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "kvconv"):
            raise
        raise MissingDependencyError(package=package, extra=extra) from error


def print_json(value: Any) -> None:
    """Write one JSON line to stdout."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_status(message: str) -> None:
    """Write one line about progress to stderr; stdout carries results only."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def _remember_debug(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    ctx.meta["kvconv.debug"] = value


def _one_line(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"Not enough memory: {error}. Close other programs or choose a smaller model."
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        remedy = _REMEDIES.get(error.errno, "")
        return f"{where}{error.strerror}. {remedy}".strip()
    return " ".join(str(error).split())
