"""kvconv build: the bundle afterwards, and what is refused before anything is compiled."""

import json
import shutil
import sys

import onnx
import pytest
from click.testing import CliRunner

from kvconv import names
from kvconv.cli import main
from kvconv.converter import ExportOptions, export
from kvconv.converter.kernel_builder import TritonKernels
from kvconv.manifest import Kernels, check_files, read_manifest

CONTENT = b"other kernels"


class Kernel:
    def build(self, model_path):
        return b"kernels", Kernels(("sm_80",), 4)


@pytest.fixture(scope="module")
def exported_for_cuda(tmp_path_factory, checkpoint):
    path = tmp_path_factory.mktemp("build") / "bundle"
    options = ExportOptions(provider="cuda", dtype="float16")
    export(str(checkpoint("llama")), path, options, kernels=Kernel())
    return path


@pytest.fixture
def bundle(exported_for_cuda, tmp_path):
    return shutil.copytree(exported_for_cuda, tmp_path / "a bundle")


@pytest.fixture
def compiler(monkeypatch):
    """Stands for the compiler: takes the GPUs, and returns bytes that nothing reads."""
    monkeypatch.setattr(TritonKernels, "build", lambda self, path: (CONTENT, Kernels(self.gpus, 7)))


def build(*arguments):
    return CliRunner().invoke(main, ["build", *map(str, arguments)])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_build_replaces_kernels_graph_and_manifest_and_nothing_else(bundle, compiler):
    before = contents(bundle)
    result = build(bundle, "--gpu", "sm_90,sm_86", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["gpus"], report["num_kernels"]) == (["sm_86", "sm_90"], 7)
    assert report["size_bytes"] == len(CONTENT)
    after = contents(bundle)
    assert after[names.KERNELS_FILE] == CONTENT
    changed = {name for name in before.keys() | after if before.get(name) != after.get(name)}
    assert changed == {names.KERNELS_FILE, names.MODEL_FILE, names.MANIFEST_FILE}
    manifest = read_manifest(bundle)
    check_files(bundle, manifest, hash_all=True)
    assert manifest.kernels == Kernels(("sm_86", "sm_90"), 7)
    graph = onnx.load(bundle / names.MODEL_FILE, load_external_data=False).graph
    (initializer,) = [t for t in graph.initializer if t.name == names.KERNELS_INITIALIZER]
    assert list(initializer.dims) == [len(CONTENT)]
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]


def test_build_again_gives_the_same_bundle(bundle, compiler):
    build(bundle)
    once = contents(bundle)
    assert "7 kernels for sm_80, sm_86" in build(bundle).stdout
    assert contents(bundle) == once
    shown = CliRunner().invoke(main, ["inspect", str(bundle)]).stdout
    assert "CUDA kernels  7, compiled for sm_80, sm_86" in shown


def test_failed_compilation_leaves_the_bundle_as_it_was(bundle):
    before = contents(bundle)
    result = build(bundle, "--gpu", "sm_80")
    assert result.exit_code == 1
    assert "has head_dim 8; kvconv's CUDA kernels take" in result.stderr
    assert contents(bundle) == before


def test_unknown_gpu_is_refused_in_one_line(bundle, compiler):
    result = build(bundle, "--gpu", "sm_80,gtx")
    assert result.exit_code == 1
    assert "'gtx' is no GPU that kvconv compiles for. Choose of sm_80," in result.stderr
    assert result.stderr.count("\n") == 1


def test_bundle_for_the_cpu_is_refused_with_the_export_that_makes_the_other(exported, compiler):
    result = build(exported("llama").path)
    assert result.exit_code == 1
    assert "is a bundle for the CPU" in result.stderr
    assert "kvconv export MODEL -o BUNDLE --provider cuda" in result.stderr


def test_damaged_bundle_is_refused(bundle, compiler):
    (bundle / names.KERNELS_FILE).write_bytes(b"")
    result = build(bundle)
    assert result.exit_code == 1
    assert f"{names.KERNELS_FILE} in {bundle} is damaged" in result.stderr


def test_without_triton_the_extra_that_brings_it_is_named(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    before = contents(bundle)
    result = build(bundle, "--gpu", "sm_80")
    assert result.exit_code == 1
    assert 'pip install "kvconv[build]"' in result.stderr
    assert contents(bundle) == before
