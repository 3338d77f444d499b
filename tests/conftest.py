"""Fixtures that are made once: tiny decoders, their traces, checkpoints and bundles."""

import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell; programs that tests interrupt must not inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give a factory of tiny checkpoints on disk: `checkpoint("llama", **config) -> folder`."""
    from tiny_decoders import save_tiny

    @functools.cache
    def make(model_type: str = "llama", **overrides: Any) -> Path:
        return save_tiny(tmp_path_factory.mktemp(model_type) / model_type, model_type, **overrides)

    return make


@pytest.fixture
def copied(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """Give a tiny checkpoint of the test's own, to be spoilt."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]
) -> Callable[..., Any]:
    """Give a factory of verified exports: `exported("llama", **options) -> ExportReport`."""
    from kvconv.converter import ExportOptions, export
    from kvconv.verify import Verifier

    @functools.cache
    def make(model_type: str = "llama", **options: Any) -> Any:
        output = tmp_path_factory.mktemp("bundle") / model_type
        verifier = Verifier(prompt_tokens=24, threads=1)
        return export(str(checkpoint(model_type)), output, ExportOptions(**options), verifier)

    return make


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Give a factory of traces: model type -> (PyTorch model, spec, path of the traced graph)."""
    from kvconv.converter.decoder_spec import describe
    from kvconv.converter.simplify import simplify
    from kvconv.converter.trace import trace
    from kvconv.converter.weights import lay_out, save
    from tiny_decoders import tiny_model

    @functools.cache
    def make(model_type: str) -> Any:
        model = tiny_model(model_type)
        spec = describe(model)
        graph = trace(model, spec, opset=23)
        lay_out(graph)
        simplify(graph)
        return model, spec, save(graph, tmp_path_factory.mktemp(model_type))

    return make
