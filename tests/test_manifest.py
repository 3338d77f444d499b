"""The manifest: round trip, and every kind of damage names the file and the remedy."""

import dataclasses
import hashlib
import json

import pytest

from kvconv.errors import BundleError, VerificationError
from kvconv.manifest import (
    FLOAT_WEIGHTS,
    CacheLayer,
    CheckResult,
    FileEntry,
    Manifest,
    Quantization,
    RunSizes,
    Source,
    Verification,
    check_files,
    file_entry,
    read_manifest,
)
from kvconv.names import MANIFEST_FILE
from kvconv.plan import kv_cache_bytes


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"graph")
    layer = CacheLayer(3, 64, 32, "float32", window_size=512)
    manifest = Manifest(
        source=Source("a folder/模型", "folder", license="apache-2.0"),
        architecture="LlamaForCausalLM",
        model_type="llama",
        attention="flash",
        dtype="float32",
        weights_dtype="float32",
        opset=23,
        op_version=1,
        vocab_size=100,
        max_sequence_length=8192,
        eos_token_ids=(1, 2),
        bos_token_id=None,
        pad_token_id=0,
        cache_layers=(layer, dataclasses.replace(layer, window_size=None)),
        inputs=("input_ids",),
        outputs=("logits",),
        rewrites={"attention": 2},
        files={"model.onnx": file_entry(tmp_path / "model.onnx")},
        verification=Verification(
            "passed", 1e-3, (CheckResult("whole prefill", 9, 1e-5, 1e-6, 0.0, 1.0, True),), ("x",)
        ),
    )
    manifest.write(tmp_path)
    return tmp_path, manifest


def test_round_trip_keeps_every_field(bundle):
    folder, manifest = bundle
    assert read_manifest(folder) == manifest
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST_FILE, "model.onnx"]


def test_round_trip_keeps_how_weights_are_quantised(bundle):
    folder, manifest = bundle
    quantization = Quantization(32, False, 4, "least squares", {"4 bits, blocks of 32": 1000})
    manifest = dataclasses.replace(manifest, weights_dtype="int4", quantization=quantization)
    manifest.write(folder)
    assert read_manifest(folder) == manifest


def test_round_trip_keeps_what_a_run_takes(bundle):
    folder, manifest = bundle
    manifest = dataclasses.replace(manifest, run_sizes=RunSizes(4, 80, 100))
    manifest.write(folder)
    assert read_manifest(folder) == manifest


def test_a_bundle_from_before_quantised_weights_opens(bundle):
    folder, manifest = bundle
    path = folder / MANIFEST_FILE
    document = json.loads(path.read_text())
    del document["quantization"], document["run_sizes"]
    document |= {"format_version": 1, "manifest_sha256": "0" * 64}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    checksum = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(text.replace("0" * 64, checksum))
    assert read_manifest(folder) == dataclasses.replace(manifest, format_version=1)


@pytest.mark.parametrize("position", [0, 3, 200, 700, -2])
def test_one_changed_byte_in_the_manifest_is_refused(bundle, position):
    folder, _ = bundle
    path = folder / MANIFEST_FILE
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BundleError, match="damaged") as caught:
        read_manifest(folder)
    assert caught.value.file == MANIFEST_FILE


def test_newer_format_says_upgrade(bundle):
    folder, manifest = bundle
    dataclasses.replace(manifest, format_version=99).write(folder)
    with pytest.raises(BundleError, match="format version 99.*Upgrade kvconv"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "int8"}, "manifest.dtype must be one of"),
        ({"architecture": 3}, "manifest.architecture must be str, found 3"),
        ({"opset": "23"}, "manifest.opset must be int, found '23'"),
        ({"attention": "magic"}, "must be one of"),
        ({"cache_layers": {}}, "manifest.cache_layers must be a list"),
        ({"surprise": 1}, "unknown \\['surprise'\\]"),
    ],
)
def test_wrong_types_are_named(bundle, change, reason):
    folder, manifest = bundle
    document = json.loads((folder / MANIFEST_FILE).read_text())
    _write_signed(folder, document | change)
    with pytest.raises(BundleError, match=reason):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("weights_dtype", "quantization", "how"),
    [("int4", None, "lacks"), ("float16", Quantization(32, True, 4, "x"), "has")],
)
def test_how_weights_are_quantised_must_suit_their_type(bundle, weights_dtype, quantization, how):
    folder, manifest = bundle
    changes = {"weights_dtype": weights_dtype, "quantization": quantization}
    dataclasses.replace(manifest, **changes).write(folder)
    with pytest.raises(BundleError, match=f"{weights_dtype}, and it {how} quantization"):
        read_manifest(folder)


def _write_signed(folder, document):
    """Write a wrong manifest with a right checksum, as a foreign tool could."""
    text = json.dumps(document | {"manifest_sha256": "0" * 64})
    checksum = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST_FILE).write_text(text.replace("0" * 64, checksum))


def test_missing_bundle_and_missing_manifest_name_the_command(tmp_path):
    with pytest.raises(BundleError, match="no bundle at .*kvconv export"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="not a bundle.*kvconv export"):
        read_manifest(tmp_path)


def test_check_files_finds_missing_resized_and_changed_files(bundle, monkeypatch):
    folder, manifest = bundle
    check_files(folder, manifest)
    path = folder / "model.onnx"
    path.write_bytes(b"grapH")
    with pytest.raises(BundleError, match=r"model\.onnx .*sha256"):
        check_files(folder, manifest)
    monkeypatch.setattr("kvconv.manifest.HASHED_ON_OPEN_BYTES", 4)
    check_files(folder, manifest)
    with pytest.raises(BundleError, match="sha256"):
        check_files(folder, manifest, hash_all=True)
    path.write_bytes(b"graphs")
    with pytest.raises(BundleError, match="6 bytes, the manifest says 5"):
        check_files(folder, manifest)
    path.unlink()
    with pytest.raises(BundleError, match=r"model\.onnx is missing"):
        check_files(folder, manifest)


def test_file_entry_is_size_and_sha256(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    wanted = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_entry(path) == FileEntry(3, wanted)


def test_kv_cache_bytes_counts_every_layer():
    layers = (CacheLayer(3, 64, 32, "float32"), CacheLayer(1, 8, 8, "float16", capacity=10))
    assert kv_cache_bytes(layers, batch_size=2, max_sequence_length=100) == (
        2 * 100 * 3 * 96 * 4 + 2 * 10 * 1 * 16 * 2
    )


@pytest.mark.parametrize(
    ("first", "failing", "remedy"),
    [
        ("whole prefill", "decode", "agree. Please report"),
        (FLOAT_WEIGHTS, "decode", "--accuracy-level 1; otherwise please report"),
        ("whole prefill", FLOAT_WEIGHTS, "--weights int8, --block-size 16, or no --pure"),
    ],
)
def test_failed_check_names_the_remedy_for_the_weights(first, failing, remedy):
    checks = (
        CheckResult(first, 9, 1e-5, 1e-6, 0.0, 1.0, True),
        CheckResult(failing, 9, 3.0, 1e-6, 0.0, 1.0, False, ("the logits differ",)),
    )
    with pytest.raises(VerificationError, match=rf"'{failing}'.*{remedy}"):
        Verification("failed", 1.0, checks).require_passed()
