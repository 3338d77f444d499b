"""The op library: where it is, and how an ONNX Runtime session gets it.

The library is C++ and is built when kvconv is installed. This module imports nothing but the
standard library; it never loads the library itself, ONNX Runtime does.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from kvconv import names
from kvconv.errors import LibraryError

__all__ = ["cmake_folder", "library_path", "register"]


def library_path() -> Path:
    """Return the path of the installed op library.

    Raises:
        LibraryError: The library is not there; kvconv was not built on this machine.
    """
    path = Path(str(files("kvconv.custom_ops").joinpath(names.LIBRARY_FILE)))
    if not path.is_file():
        raise LibraryError(
            f"The op library {names.LIBRARY_FILE} is not in {path.parent}. "
            "Install kvconv again with a C++ compiler at hand: pip install --force-reinstall kvconv"
        )
    return path


def cmake_folder() -> Path:
    """Return the folder of the CMake package; headers and pkg-config file lie beside it.

    Raises:
        LibraryError: It is not there; kvconv was not built on this machine.
    """
    folder = library_path().parent.parent / "native" / "cmake"
    if not folder.is_dir():
        raise LibraryError(
            f"The native runtime is not in {folder.parent}. Install kvconv again with a C++ "
            f"compiler at hand: pip install --force-reinstall kvconv"
        )
    return folder


def register(session_options: Any) -> None:
    """Make kvconv's operators known to sessions made with these options.

    Args:
        session_options: An `onnxruntime.SessionOptions`; changed in place.

    Raises:
        LibraryError: The library is absent, or ONNX Runtime refuses it.
    """
    path = library_path()
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime's own types; this module does not import it
        raise LibraryError(
            f"ONNX Runtime refuses the op library {path}: {error}. "
            "Install kvconv and onnxruntime again, for the same machine and both up to date."
        ) from error
