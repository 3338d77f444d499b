"""Print docs/cli.md: the help text of every command. Run through `make docs`."""

import click

from kvconv.cli import COMMANDS, main


def cli_page() -> str:
    """Return docs/cli.md as text."""
    parts = [
        "# The command line",
        "",
        "Written by `make docs` from `--help`; a test fails when it is stale.",
    ]
    group = click.Context(main, info_name="kvconv", terminal_width=100, max_content_width=100)
    for name in ["", *COMMANDS]:
        command: click.Command | None = main if not name else main.get_command(group, name)
        assert command is not None
        context = group
        if name:
            context = click.Context(
                command, info_name=name, parent=group, terminal_width=100, max_content_width=100
            )
        parts += ["", f"## kvconv {name}".rstrip(), "", "```", command.get_help(context), "```"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(cli_page(), end="")
