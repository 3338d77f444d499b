"""Why CUDA cannot be used: each cause by its name, and what to do."""

import ctypes

import onnxruntime
import pytest

from kvconv.runtime import cuda


@pytest.fixture
def machine(monkeypatch):
    """Pretend a machine: its driver, its packages, its providers."""

    def make(*, driver=True, packages=("onnxruntime-gpu",), providers=("CUDAExecutionProvider",)):
        def load(name):
            assert name == cuda.DRIVER_LIBRARY
            if not driver:
                raise OSError(name)

        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(cuda, "_is_installed", lambda name: name in packages)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(providers))
        return cuda.why_unavailable()

    return make


def test_nothing_is_wrong_where_all_is_there(machine):
    assert machine() is None


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"driver": False}, ["no NVIDIA driver was found", cuda.DRIVER_LIBRARY, "--provider cpu"]),
        (
            {"packages": ("onnxruntime",), "providers": ("CPUExecutionProvider",)},
            ["onnxruntime", "is built for the CPU", "pip install 'kvconv[cuda]'"],
        ),
        (
            {"packages": ("onnxruntime", "onnxruntime-gpu")},
            ["both installed", "pip uninstall -y onnxruntime onnxruntime-gpu"],
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_remedy(machine, facts, words):
    why = machine(**facts)
    assert all(word in why for word in words), why
