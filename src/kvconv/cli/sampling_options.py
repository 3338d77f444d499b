"""The options of `kvconv run` that become `SamplingParams`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvconv.runtime import SamplingParams

_OPTIONS = (
    click.option(
        "--max-new-tokens", type=int, default=256, show_default=True, metavar="N",
        help="Most tokens to add.",
    ),
    click.option(
        "--temperature", type=float, default=0.0, show_default=True, metavar="T",
        help="0 takes the most likely token; higher is more random.",
    ),
    click.option(
        "--top-k", type=int, default=0, show_default=True, metavar="K",
        help="Keep the K most likely tokens; 0 keeps all.",
    ),
    click.option(
        "--top-p", type=float, default=1.0, show_default=True, metavar="P",
        help="Keep the most likely tokens that add up to P; 1 keeps all.",
    ),
    click.option(
        "--min-p", type=float, default=0.0, show_default=True, metavar="P",
        help="Keep tokens at least P times as likely as the most likely; 0 keeps all.",
    ),
    click.option(
        "--repetition-penalty", type=float, default=1.0, show_default=True, metavar="R",
        help="Above 1 makes tokens that occurred less likely.",
    ),
    click.option("--seed", type=int, metavar="N", help="Make random draws repeatable."),
    click.option(
        "--stop", multiple=True, metavar="TEXT",
        help="End before this text; may be given several times.",
    ),
)  # fmt: skip


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options, one for each field of `SamplingParams` and of its name."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sampling_params(options: dict[str, Any]) -> "SamplingParams":
    """Make `SamplingParams` of what the options hold.

    Raises:
        click.UsageError: A value is out of its range.
    """
    from kvconv.runtime import SamplingParams

    try:
        return SamplingParams(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
