"""Commands that compute nothing start at once: they import nothing heavy."""

import subprocess
import sys

import pytest

from tiny_bundle import write_bundle


@pytest.mark.parametrize(("command", "printed"), [("--help", "Usage: "), ("plan", "KV cache")])
def test_light_commands_import_nothing_heavy(command, printed, tmp_path):
    bundle = [] if command == "--help" else [str(write_bundle(tmp_path / "bundle"))]
    code = (
        "import sys\n"
        "from kvconv.cli import main\n"
        f"try: main({[command, *bundle]!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'onnxruntime', 'transformers', 'numpy', 'onnx'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed in result.stdout
    assert result.stdout.endswith("[]\n")
