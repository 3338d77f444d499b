"""Print docs/cli.md: the help text of every command. Run through `make docs`."""

from click.testing import CliRunner

from kvconv.cli import COMMANDS, main


def cli_page() -> str:
    """Return docs/cli.md as text."""
    parts = [
        "# The command line",
        "",
        "Written by `make docs` from `--help`; a test fails when it is stale.",
    ]
    for words in [[], *([name] for name in COMMANDS)]:
        arguments = [*words, "--help"]
        result = CliRunner().invoke(main, arguments, prog_name="kvconv", max_content_width=100)
        parts += ["", "## " + " ".join(["kvconv", *words]), "", "```", result.stdout.strip(), "```"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(cli_page(), end="")
