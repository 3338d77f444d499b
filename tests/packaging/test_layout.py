"""What an installation holds, and what it never imports."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel_members(tmp_path_factory):
    """Build the wheel once; return the names inside."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("kvconv-*.whl")
    assert "-py3-none-" in wheel.name
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_holds_every_python_file_and_the_library(wheel_members):
    folders = {"src/kvconv": "kvconv"}
    folders |= {name: f"kvconv/{name}" for name in ("converter", "runtime", "custom_ops")}
    for source, target in folders.items():
        for path in (ROOT / source).rglob("*.py"):
            relative = path.relative_to(ROOT / source).as_posix()
            if relative.partition("/")[0] not in ("converter", "runtime", "custom_ops"):
                assert f"{target}/{relative}" in wheel_members
    assert "kvconv/custom_ops/libkvconv_ops.so" in wheel_members
    assert "kvconv/custom_ops/libkvconv_runtime.so" in wheel_members
    assert "kvconv/py.typed" in wheel_members


def test_wheel_holds_no_sources_of_the_library_and_no_tests(wheel_members):
    allowed = (".py", ".typed", ".so")
    strays = [
        name for name in wheel_members if not name.endswith(allowed) and ".dist-info/" not in name
    ]
    for embedding in ("include/kvconv.h", "include/kvconv.hpp", "cmake/kvconvConfig.cmake"):
        assert f"kvconv/native/{embedding}" in strays
    assert all(name.startswith("kvconv/native/") for name in strays)
    assert not any(name.startswith("tests") for name in wheel_members)


def test_runtime_imports_neither_torch_nor_transformers_nor_onnx():
    code = (
        "import sys\n"
        "import kvconv.runtime, kvconv.custom_ops, kvconv.cli.run, kvconv.cli.inspect\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'onnx_graphsurgeon'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
