"""How C and C++ projects find the installed kvconv: CMake, pkg-config, and the folder by itself."""

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvconv import __version__, custom_ops
from kvconv.cli import main

PROGRAM = """
#include <kvconv.hpp>
#include <cstdio>
int main() {
  try {
    kvconv::Model model("/nowhere");
  } catch (const kvconv::Error& error) {
    std::printf("%s %d", kvconv_version(), error.code());
  }
}
"""
PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(program LANGUAGES CXX)
find_package(kvconv 0.1 REQUIRED)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE kvconv::kvconv)
"""
EXPECTED = f"{__version__} 4"


@pytest.fixture
def folder() -> Path:
    result = CliRunner().invoke(main, ["doctor", "--cmake-dir"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{custom_ops.cmake_folder()}\n"
    return Path(result.stdout.strip())


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def output(*command: object, cwd: Path | None = None, **environment: str) -> str:
    arguments = list(map(str, command))
    result = subprocess.run(
        arguments, capture_output=True, text=True, cwd=cwd, env=environment or None
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_cmake_finds_the_package_and_links_a_program(folder, tmp_path):
    needs("cmake")
    (tmp_path / "program.cpp").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    output("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-Dkvconv_DIR={folder}")
    output("cmake", "--build", tmp_path / "build")
    assert output(tmp_path / "build/program") == EXPECTED


def test_pkg_config_says_how_to_build(folder, tmp_path):
    needs("pkg-config")
    path = str(folder.parent / "pkgconfig")
    flags = output(shutil.which("pkg-config"), "--cflags", "--libs", "kvconv", PKG_CONFIG_PATH=path)
    (tmp_path / "program.cpp").write_text(PROGRAM)
    output("c++", "-std=c++17", "program.cpp", *flags.split(), "-o", "program", cwd=tmp_path)
    assert output(tmp_path / "program") == EXPECTED


def test_cmake_folder_without_the_native_runtime_is_refused(monkeypatch, tmp_path):
    library = tmp_path / "custom_ops" / "libkvconv_ops.so"
    monkeypatch.setattr(custom_ops, "library_path", lambda: library)
    result = CliRunner().invoke(main, ["doctor", "--cmake-dir"])
    assert result.exit_code == 1
    assert str(tmp_path / "native") in result.output
