"""Finding and registering the op library, and what it exports."""

import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from kvconv import custom_ops, names
from kvconv.errors import LibraryError


def test_library_path_is_the_installed_library() -> None:
    path = custom_ops.library_path()
    assert path.name == names.LIBRARY_FILE
    assert 10_000 < path.stat().st_size < 2_000_000  # every bundle has a copy


def test_library_path_absent_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(custom_ops, "files", lambda package: tmp_path)
    with pytest.raises(LibraryError, match=str(tmp_path)):
        custom_ops.library_path()


def test_register_twice_in_one_process() -> None:
    for _ in range(2):
        custom_ops.register(onnxruntime.SessionOptions())


def test_register_damaged_library_raises_with_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / names.LIBRARY_FILE).write_bytes(b"not a library")
    monkeypatch.setattr(custom_ops, "files", lambda package: tmp_path)
    with pytest.raises(LibraryError, match=names.LIBRARY_FILE) as raised:
        custom_ops.register(onnxruntime.SessionOptions())
    assert raised.value.__cause__ is not None


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file with nm")
def test_library_exports_one_function_only() -> None:
    command = ["nm", "-D", "--defined-only", str(custom_ops.library_path())]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in output.splitlines()] == ["RegisterCustomOps"]


def test_import_needs_only_the_standard_library() -> None:
    heavy = "numpy onnxruntime torch onnx".split()
    code = f"import sys, kvconv.custom_ops; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
