"""The help texts: fast, complete, and equal to docs/cli.md."""

import importlib.util
from pathlib import Path

from click.testing import CliRunner

from kvconv.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]


def test_every_command_has_help_for_every_option():
    for name in COMMANDS:
        command = main.get_command(None, name)
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, f"kvconv {name} {parameter.opts}"
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0
        assert "\\b" not in result.stdout  # click's mark for lines that must not be joined


def test_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(main, ["exprot"]).exit_code == 2


def test_cli_page_is_not_stale():
    specification = importlib.util.spec_from_file_location("cli_page", ROOT / "recipes/docs/cli.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert (ROOT / "docs/cli.md").read_text() == module.cli_page(), "run `make docs`"


def test_ctrl_c_while_a_command_is_imported_exits_with_130(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvconv.cli.importlib.import_module", interrupted)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 130
