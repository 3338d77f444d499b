"""Whole exports of tiny decoders: the bundle, the manifest, and what happens when one fails."""

import errno
import os
import shutil

import onnx
import onnxruntime as ort
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kvconv import custom_ops, names
from kvconv.converter import ExportOptions, bundle, export
from kvconv.converter.genai_config import genai_config
from kvconv.errors import ExportError, VerificationError
from kvconv.manifest import CacheLayer, CheckResult, Verification, check_files, read_manifest
from tiny_decoders import WINDOW

EXPORTS = {
    "llama flash": ("llama", {}),
    "gemma3 flash": ("gemma3_text", {}),
    "gpt2 flash": ("gpt2", {"max_sequence_length": 100}),
    "qwen3 float16": ("qwen3", {"dtype": "float16"}),
    "gemma2 standard 18": ("gemma2", {"attention": "standard", "opset": 18}),
    "gemma3 gqa": ("gemma3_text", {"attention": "gqa"}),
    "deepseek float16": ("deepseek_v3", {"dtype": "float16"}),
}
FAST = ("llama flash", "gemma2 standard 18", "gemma3 gqa")
"""One of each flavour for the fast tests."""
EXPORT_NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.kinds) for name in EXPORTS
]
OPERATORS = {
    "flash": (names.OP_DOMAIN, names.OP_NAME, names.FLOAT_CACHES_OP_VERSION),
    "gqa": (names.ORT_DOMAIN, names.GROUP_QUERY_ATTENTION, 1),
}
"""Flavour -> domain, type and domain version of its attention nodes, where they are no standard."""


@pytest.fixture(params=EXPORT_NAMES, scope="session")
def report(request, exported):
    model_type, options = EXPORTS[request.param]
    return exported(model_type, **options)


class FailedVerifier:
    """Finds the result wrong."""

    def reference(self, model, tokenizer, *, max_sequence_length):
        return "reference"

    def compare(self, folder, reference):
        assert reference == "reference"
        check_files(folder, read_manifest(folder), hash_all=True)
        result = CheckResult(
            "whole prefill", 5, 0.5, 0.1, 0.01, 0.6, False, ("the logits differ by up to 0.5",)
        )
        return Verification("failed", 1e-3, (result,))


def open_session(report):
    options = ort.SessionOptions()
    manifest = read_manifest(report.path)
    if manifest.attention == "flash":
        custom_ops.register(options)
    return ort.InferenceSession(
        report.path / names.MODEL_FILE, options, providers=["CPUExecutionProvider"]
    )


def test_bundle_agrees_with_pytorch_and_says_so(report):
    verification = read_manifest(report.path).verification
    assert verification == report.verification
    assert verification.status == "passed"
    assert len(verification.checks) == 5
    half = read_manifest(report.path).dtype == "float16"
    assert max(check.max_abs for check in verification.checks) < (0.05 if half else 1e-4)


def test_bundle_is_complete_and_alone(report):
    manifest = read_manifest(report.path)
    check_files(report.path, manifest, hash_all=True)
    found = {path.name for path in report.path.iterdir()}
    assert found == {*manifest.files, names.MANIFEST_FILE}
    assert {"config.json", "generation_config.json", "tokenizer.json", names.WEIGHTS_FILE} < found
    assert (names.LIBRARY_FILE in found) == (manifest.attention == "flash")
    assert (names.GENAI_CONFIG_FILE in found) == (genai_config(manifest) is not None)
    assert [path.name for path in report.path.parent.iterdir()] == [report.path.name]
    assert report.size_bytes == sum(path.stat().st_size for path in report.path.iterdir())


def test_num_logits_to_keep_is_overridable_and_the_manifest_names_the_graph(report):
    session, manifest = open_session(report), read_manifest(report.path)
    overridable = [value.name for value in session.get_overridable_initializers()]
    assert overridable == [names.NUM_LOGITS_TO_KEEP]
    inputs = [value.name for value in session.get_inputs()]
    assert sorted(manifest.inputs) == sorted([*inputs, *overridable])
    assert list(manifest.outputs) == [value.name for value in session.get_outputs()]
    (logits,) = [v for v in session.get_outputs() if v.name == names.LOGITS]
    assert logits.type == "tensor(float)"


@pytest.mark.parametrize(
    ("attention", "dtype", "chosen"),
    [
        ("standard", "float32", "int8"),
        ("standard", "float16", "float32"),
        ("gqa", "float32", "float16"),
        ("gqa", "float32", "int4"),
    ],
)
def test_cache_that_the_flavour_cannot_hold_is_refused_before_loading(
    tmp_path, attention, dtype, chosen
):
    options = ExportOptions(attention=attention, dtype=dtype, kv_cache_dtype=chosen)
    with pytest.raises(
        ExportError, match=f"dtype {chosen} .* {attention} flavour .* {dtype}.* --attention flash"
    ):
        export(str(tmp_path), tmp_path / "bundle", options)
    assert not (tmp_path / "bundle").exists()


def test_no_trace_of_tracing_is_left_in_the_graph(report):
    model = onnx.load(report.path / names.MODEL_FILE, load_external_data=False)
    manifest = read_manifest(report.path)
    operators = {(node.domain, node.op_type) for node in model.graph.node}
    domains = {entry.domain: entry.version for entry in model.opset_import}
    version = names.FLOAT_CACHES_OP_VERSION if manifest.attention == "flash" else None
    assert manifest.op_version == version
    if manifest.attention in OPERATORS:
        domain, operator, version = OPERATORS[manifest.attention]
        assert (domain, operator) in operators
        assert domains == {"": manifest.opset, domain: version}
    else:
        assert {domain for domain, _ in operators} == {""}
        assert domains == {"": manifest.opset}


@pytest.mark.parametrize("name", EXPORT_NAMES)
def test_manifest_states_windows_and_dtypes(exported, name):
    def layer(dtype="float32", heads=2, width=8, window=None):
        return CacheLayer(heads, width, width, dtype, window_size=window)

    model_type, options = EXPORTS[name]
    expected = {
        "llama flash": (layer(), layer()),
        "gemma3 flash": (layer(window=WINDOW), layer()),
        "gpt2 flash": (layer(heads=4), layer(heads=4)),
        "qwen3 float16": (layer("float16", width=12),) * 2,
        "gemma2 standard 18": (layer(window=WINDOW), layer()),
        "gemma3 gqa": (layer(window=WINDOW), layer()),
        "deepseek float16": (CacheLayer(1, 12, 8, "float16"),) * 2,  # rotated part and latent
    }
    assert read_manifest(exported(model_type, **options).path).cache_layers == expected[name]


@pytest.mark.kinds
def test_manifest_states_the_length_and_special_tokens(exported):
    manifest = read_manifest(exported("gpt2", max_sequence_length=100).path)
    assert manifest.max_sequence_length == 100
    assert (manifest.bos_token_id, manifest.eos_token_ids, manifest.pad_token_id) == (
        256, (257,), 258,
    )  # fmt: skip
    assert read_manifest(exported("llama").path).max_sequence_length == 128


def test_report_times_the_stages_in_order(exported):
    report = exported("llama")
    stages = ["load", "reference", "trace", "write weights", "rewrite", "finish", "verify"]
    assert list(report.seconds) == stages
    assert report.rewrites["flash"] == 2
    assert report.peak_memory_mb > 100


def test_failed_verification_leaves_the_old_bundle_and_nothing_else(checkpoint, tmp_path):
    output = tmp_path / "b"
    with bundle.new_bundle(output, overwrite=False) as folder:
        (folder / names.MANIFEST_FILE).write_text('{"files": {}}')
    model, stages = str(checkpoint("llama", num_hidden_layers=1)), []
    with pytest.raises(VerificationError, match="whole prefill.*0.5.*60.0%") as info:
        export(
            model, output, ExportOptions(overwrite=True), FailedVerifier(), progress=stages.append
        )
    assert (info.value.max_abs, info.value.tolerance) == (0.5, 1e-3)
    assert stages[-1] == "verify"
    assert (output / names.MANIFEST_FILE).read_text() == '{"files": {}}'
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_length_beyond_the_models_is_refused_with_both_numbers(checkpoint, tmp_path):
    options = ExportOptions(max_sequence_length=129)
    with pytest.raises(ExportError, match="is 129, but LlamaForCausalLM was made for 128"):
        export(str(checkpoint("llama")), tmp_path / "b", options)
    assert list(tmp_path.iterdir()) == []


def test_model_that_states_no_length_asks_for_one(tmp_path):
    config = AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bloom")
    with pytest.raises(ExportError, match="--max-sequence-length"):
        export(str(tmp_path / "bloom"), tmp_path / "b")


@pytest.mark.kinds
def test_longrope_limits_the_length_to_where_it_switches_and_says_so(exported):
    manifest = read_manifest(exported("phi3").path)
    assert manifest.max_sequence_length == 16
    (sentence,) = manifest.refusals
    assert sentence.startswith("max_sequence_length: 16 of 128 tokens: Phi3ForCausalLM changes")
    assert manifest.verification.status == "passed"


def test_longrope_beyond_its_switch_is_refused_with_both_numbers(checkpoint, tmp_path):
    options = ExportOptions(max_sequence_length=17)
    with pytest.raises(ExportError, match="is 17, but Phi3ForCausalLM .* Choose at most 16"):
        export(str(checkpoint("phi3")), tmp_path / "b", options)
    assert not (tmp_path / "b").exists()


def test_disk_without_room_is_refused_before_tracing(checkpoint, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    stages = []
    with pytest.raises(ExportError, match="0 MB free"):
        export(str(checkpoint("llama")), tmp_path / "b", progress=stages.append)
    assert stages == ["load"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("weights", "part"), [(None, 1), ("int8", 0.375), ("int4", 0.375)])
def test_room_for_quantised_weights_is_what_they_take(
    checkpoint, tmp_path, monkeypatch, weights, part
):
    def stop(folder, weight_bytes):
        raise ExportError(f"{weight_bytes}")

    monkeypatch.setattr(bundle, "check_free_space", stop)
    model = checkpoint("llama")
    float_bytes = 4 * AutoModelForCausalLM.from_pretrained(model).num_parameters()
    with pytest.raises(ExportError, match=f"^{round(part * float_bytes)}$"):
        export(str(model), tmp_path / "b", ExportOptions(weights=weights))


def test_disk_that_fills_up_on_the_way_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def fill(model, spec, *, opset):
        (tmp_path / "seen").write_text(str([path.name for path in tmp_path.iterdir()]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.onnx.data")

    monkeypatch.setattr("kvconv.converter.trace.trace", fill)
    with pytest.raises(OSError, match="No space left"):
        export(str(checkpoint("llama")), tmp_path / "b")
    assert "partial" in (tmp_path / "seen").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]
