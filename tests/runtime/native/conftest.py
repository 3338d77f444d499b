"""The native runtime: the installed one, or one that was built with sanitizers."""

import os
from pathlib import Path

import pytest

from kvconv import custom_ops
from kvconv_c import Library


@pytest.fixture(scope="session")
def library() -> Library:
    built = os.environ.get("KVCONV_SANITIZED")  # a build folder; see `make test-native`
    folder = Path(built) / "lib" if built else custom_ops.library_path().parent
    return Library(folder / "libkvconv_runtime.so")
