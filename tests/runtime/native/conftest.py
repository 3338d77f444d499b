"""The native runtime: the installed one, or one that was built with sanitizers."""

import os
from pathlib import Path

import onnxruntime
import pytest

from kvconv import custom_ops
from kvconv_c import Library


@pytest.fixture(scope="session")
def library() -> Library:
    built = os.environ.get("KVCONV_SANITIZED")  # a build folder; see `make test-native`
    folder = Path(built) / "lib" if built else custom_ops.library_path().parent
    if built:  # only the installed one lies beside the wheels that it looks for
        packages = Path(onnxruntime.__file__).parents[1]
        os.environ.setdefault("KVCONV_ONNXRUNTIME", str(packages / "onnxruntime/capi"))
        os.environ.setdefault("KVCONV_TOKENIZER", str(packages / "onnxruntime_extensions"))
    return Library(folder / "libkvconv_runtime.so")
