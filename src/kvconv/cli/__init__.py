"""The `kvconv` command: a Click group that imports each command's module only when it is used."""

import importlib
from typing import Any

import click

from kvconv import __version__

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and SIGINT's number, as shells have it."""

COMMANDS = {
    "export": "Convert a Hugging Face decoder into a bundle.",
    "build": "Compile the CUDA kernels of a bundle again, for other GPUs.",
    "run": "Generate text from a bundle or a model.",
    "verify": "Compare a bundle's logits with PyTorch's.",
    "plan": "Count the memory that a model or a bundle takes, and what fits.",
    "bench": "Measure speed and memory, alone or against another bundle.",
    "inspect": "Show what a bundle holds; --check hashes every file.",
    "doctor": "Show versions, providers and what is missing.",
}


class LazyGroup(click.Group):
    """Loads `kvconv.cli.<name>` and takes its `command` when that command is asked for."""

    def invoke(self, ctx: click.Context) -> Any:
        """Find and run a command; Ctrl-C ends each with the exit code that shells expect."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # also while a command's module is imported
            click.echo(err=True)
            raise click.exceptions.Exit(INTERRUPTED) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names in the order of a first session."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"kvconv.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvconv")
def main() -> None:
    """Convert a Hugging Face decoder to ONNX with an in-place KV cache, and run it fast.

    \b
    kvconv export HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2
    kvconv run smollm2 "What is the capital of France?" --chat-template

    `kvconv COMMAND --help` tells the rest; start with `kvconv doctor` when something is amiss.
    """  # noqa: D301 - click wants the control character that \b stands for
