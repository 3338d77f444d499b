"""kvconv inspect: what it shows, and that --check finds every changed byte."""

import dataclasses
import json
import shutil
import subprocess
import sys

import onnx
import pytest
from click.testing import CliRunner

from kvconv.cli import main
from kvconv.manifest import file_entry, read_manifest
from tiny_bundle import write_bundle


@pytest.fixture
def bundle(exported, tmp_path):
    return shutil.copytree(exported("llama").path, tmp_path / "a bundle")


def inspect(*arguments):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def test_inspect_json_counts_operators_and_cache_bytes(bundle):
    report = json.loads(inspect(bundle, "--json").stdout)
    layers = report["layers"]
    assert report["ops"]["kvconv::FlashAttention"] == len(layers)
    per_token = sum(
        4 * layer["num_key_value_heads"] * (layer["key_head_dim"] + layer["value_head_dim"])
        for layer in layers
    )
    assert report["cache_bytes_per_token"] == per_token
    assert set(report["files"]) == {path.name for path in bundle.iterdir()} - {"kvconv.json"}
    assert report["checked"] is False


def test_inspect_text_names_the_model_and_every_file(bundle):
    text = inspect(bundle).stdout
    assert "LlamaForCausalLM" in text
    assert all(name in text for name in read_manifest(bundle).files)


def test_inspect_shows_how_keys_and_values_are_stored(tmp_path):
    bundle = write_bundle(tmp_path / "bundle", attention="flash", cache_dtype="int4")
    text = inspect(bundle).stdout
    assert "40 bytes per token and sequence" in text  # 20 and 16, and two scales of 2
    assert "1 KV heads, key width 8, value width 8, int4, no window" in text


def test_closed_pipe_ends_quietly(bundle):
    command = [sys.executable, "-c", "from kvconv.cli import main; main()", "inspect", str(bundle)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def test_check_finds_one_changed_byte_in_every_file(bundle):
    assert "every file matches its sha256" in inspect(bundle, "--check").stdout
    for name in (*read_manifest(bundle).files, "kvconv.json"):
        path = bundle / name
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 4
        path.write_bytes(changed)
        result = inspect(bundle, "--check")
        assert result.exit_code == 1, name
        assert name in result.stderr
        assert result.stderr.count("\n") == 1
        path.write_bytes(whole)


def test_weights_in_a_file_that_the_manifest_does_not_list_are_refused(bundle):

    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    moved = 0
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value, moved = "elsewhere.bin", moved + 1
    assert moved
    onnx.save(model, bundle / "model.onnx")
    (bundle / "model.onnx.data").rename(bundle / "elsewhere.bin")
    manifest = read_manifest(bundle)
    files = {**manifest.files, "model.onnx": file_entry(bundle / "model.onnx")}
    del files["model.onnx.data"]
    dataclasses.replace(manifest, files=files).write(bundle)
    result = inspect(bundle)
    assert result.exit_code == 1
    assert "elsewhere.bin, which kvconv.json does not list" in result.stderr


def test_graph_that_is_no_onnx_file_is_one_line(bundle):
    (bundle / "model.onnx").write_bytes(b"garbage")
    manifest = read_manifest(bundle)
    files = {**manifest.files, "model.onnx": file_entry(bundle / "model.onnx")}
    dataclasses.replace(manifest, files=files).write(bundle)
    result = inspect(bundle)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: model.onnx in ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a\\b", "c:x", "..", ""])
def test_file_names_that_leave_the_folder_are_refused(bundle, name):

    manifest = read_manifest(bundle)
    files = {**manifest.files, name: manifest.files["model.onnx"]}
    dataclasses.replace(manifest, files=files).write(bundle)
    result = inspect(bundle, "--check")
    assert result.exit_code == 1
    assert "not a plain file name" in result.stderr


def test_inspect_says_what_rewriting_left_alone(bundle):
    assert "left alone" not in inspect(bundle).stdout
    refusals = ("mask: node 1: it stays a bias", "rotary: node 2: no rotation is known")
    dataclasses.replace(read_manifest(bundle), refusals=refusals).write(bundle)
    text = inspect(bundle).stdout
    assert all(f"left alone    {refusal}" in text for refusal in refusals)
    assert json.loads(inspect(bundle, "--json").stdout)["refusals"] == list(refusals)
