"""Fixtures that are made once: tiny decoders, their traces, checkpoints and bundles."""

import dataclasses
import functools
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

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
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give `made_once(name, make)`: a folder that all test processes share.

    The first to ask fills it with `make(folder)`; the others wait for that.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def get(name: str, make: Callable[[Path], None]) -> Path:
        folder = root / f"shared-{name}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                make(partial)
                partial.rename(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def exported(made_once: Callable[..., Path], checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    """Give a factory of verified exports: `exported("llama", **options) -> ExportReport`."""
    from kvconv.converter import ExportOptions, export
    from kvconv.verify import Verifier

    @functools.cache
    def make(model_type: str = "llama", **options: Any) -> Any:
        def fill(folder: Path) -> None:
            verifier = Verifier(prompt_tokens=24, threads=1)
            bundle = folder / "bundle" / model_type
            bundle.parent.mkdir()
            report = export(str(checkpoint(model_type)), bundle, ExportOptions(**options), verifier)
            (folder / "report").write_bytes(pickle.dumps(report))

        words = "-".join(str(word) for item in sorted(options.items()) for word in item)
        folder = made_once(f"bundle-{model_type}-{words}", fill)
        report = pickle.loads((folder / "report").read_bytes())
        return dataclasses.replace(report, path=folder / "bundle" / model_type)

    return make


@pytest.fixture(scope="session")
def traced(made_once: Callable[..., Path]) -> Callable[[str], Any]:
    """Give a factory of traces: model type -> (PyTorch model, spec, path of the traced graph)."""
    from kvconv import names
    from kvconv.converter.decoder_spec import describe
    from kvconv.converter.interleaved import sort_columns
    from kvconv.converter.packed import pack
    from kvconv.converter.simplify import simplify
    from kvconv.converter.trace import trace
    from kvconv.converter.weights import lay_out, save
    from tiny_decoders import tiny_model

    @functools.cache
    def make(model_type: str) -> Any:
        model = tiny_model(model_type)
        spec = describe(model)

        def fill(folder: Path) -> None:
            graph = trace(model, spec, opset=23)
            lay_out(graph)
            pack(graph)
            simplify(graph)
            sort_columns(graph)
            save(graph, folder)

        return model, spec, made_once(f"trace-{model_type}", fill) / names.MODEL_FILE

    return make
