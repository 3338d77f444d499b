"""The installed native runtime."""

import pytest

from kvconv import custom_ops
from kvconv_c import Library


@pytest.fixture(scope="session")
def library() -> Library:
    return Library(custom_ops.library_path().parent / "libkvconv_runtime.so")
