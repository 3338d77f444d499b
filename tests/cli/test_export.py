"""`kvconv export`: what it prints, and how it refuses."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import BertConfig, BertForMaskedLM

from kvconv.cli import main
from kvconv.errors import OutputExistsError
from kvconv.manifest import read_manifest


def run(*arguments):
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def assert_one_line(result, *parts):
    """Exit code 1, nothing on stdout, and one line that starts with Error:"""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert result.stderr.endswith(errors[0] + "\n")
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in errors[0]


@pytest.fixture(scope="module")
def bad_models(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("bad")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=16)).save_pretrained(folder / "bert")
    corrupt = Path(shutil.copytree(checkpoint("llama"), folder / "corrupt"))
    (corrupt / "model.safetensors").write_bytes(b"\xff" * 100)
    (folder / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x07")
    return folder


def test_export_reports_stages_numbers_and_the_next_command(checkpoint, tmp_path, monkeypatch):
    # Names with spaces, quotes and letters of other scripts work everywhere.
    model = shutil.copytree(checkpoint("llama"), tmp_path / "größe, 漢字" / "it's a model")
    output = tmp_path / "mein bündel 束"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "größe, 漢字"))
    result = run(model, "-o", output, "--max-sequence-length", 64)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    for stage in ("load", "reference", "trace", "write weights", "rewrite", "finish", "verify"):
        assert f"\n{stage} " in "\n" + result.stderr
    assert "flash 2" in result.stderr
    assert "whole prefill" in result.stderr
    assert f"Next: kvconv run '{output}'" in result.stderr
    assert read_manifest(output).max_sequence_length == 64

    again = run(model, "-o", output)
    assert_one_line(again, "--overwrite")


def test_quantised_weights_are_counted_and_inspect_shows_them(checkpoint, tmp_path):
    result = run(checkpoint("llama"), "-o", tmp_path / "bundle", "--weights", "int4")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "bundle")
    forms = manifest.quantization.stored_bytes
    assert forms.keys() == {"8 bits, blocks of 32", "4 bits, blocks of 16"}
    assert f"{sum(forms.values()) / 1e6:.2f}" != "0.00"
    assert " MB in 4 bits, blocks of 16" in result.stderr
    assert "float weights" in result.stderr
    text = CliRunner().invoke(main, ["inspect", str(tmp_path / "bundle")]).stdout
    assert "weights int4" in text
    assert "in 8 bits, blocks of 32" in text
    assert "kvconv::MatMulNBits" in text


def test_asymmetric_int8_is_refused_before_anything_is_loaded(checkpoint, tmp_path):
    result = run(checkpoint("llama"), "-o", tmp_path / "b", "--weights", "int8", "--asymmetric")
    assert_one_line(result, "--asymmetric", "int8 weights are symmetric")


def test_json_is_one_line_on_stdout(checkpoint, tmp_path):
    output = tmp_path / "b"
    model = checkpoint("llama", num_hidden_layers=1)
    result = run(model, "-o", output, "--no-verify", "--json", "--attention", "standard")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert report["path"] == str(output)
    assert report["rewrites"]["standard"] == 1
    assert report["verification"]["status"] == "skipped"
    assert report["seconds"].keys() >= {"load", "trace"}
    assert read_manifest(output).verification.status == "skipped"


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("nowhere/at/all", ["no file or folder"]),
        ("someone/absent", ["hub cannot be reached"]),
        ("bert", ["BertForMaskedLM", "not a decoder"]),
        ("corrupt", ["damaged or incomplete"]),
        ("cut.gguf", ["damaged or incomplete"]),
    ],
    ids=["missing path", "missing id", "BERT", "corrupt safetensors", "truncated gguf"],
)
def test_bad_model_is_one_line_and_nothing_is_written(bad_models, tmp_path, model, parts):
    path = bad_models / model
    result = run(path if path.exists() else model, "-o", tmp_path / "b")
    assert_one_line(result, *parts)
    assert list(tmp_path.iterdir()) == []


def test_output_that_is_no_bundle_is_refused_even_with_overwrite(checkpoint, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    result = run(checkpoint("llama"), "-o", tmp_path, "--overwrite")
    assert_one_line(result, "not a bundle")
    assert (tmp_path / "notes.txt").read_text() == "x"


def test_output_is_checked_before_the_model_is_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert_one_line(run("nowhere/at/all", "-o", tmp_path), "not a bundle")


def test_no_permission_is_one_line(checkpoint, tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = run(checkpoint("llama"), "-o", tmp_path / "b")
    assert_one_line(result, "cannot be written", "Permission denied")


def test_disk_that_fills_up_is_one_line(checkpoint, tmp_path, monkeypatch):
    def fill(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.onnx.data")

    monkeypatch.setattr("kvconv.converter.trace.trace", fill)
    result = run(checkpoint("llama"), "-o", tmp_path / "b", "--no-verify")
    assert_one_line(result, "model.onnx.data", "No space left on device", "Free some space")
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where_an_error_came_from(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    result = run("nowhere", "-o", tmp_path, "--debug")
    assert isinstance(result.exception, OutputExistsError)


@pytest.mark.parametrize(
    "arguments",
    [["--opset", "17"], ["--dtype", "bfloat16"], ["--attention", "x"], ["--gpu", "sm_90"]],
    ids=str,
)
def test_wrong_usage_exits_with_2(tmp_path, arguments):
    assert run("model", "-o", tmp_path / "b", *arguments).exit_code == 2


@pytest.mark.parametrize(("number", "delay"), [(signal.SIGINT, 0.6), (signal.SIGTERM, 0.1)])
def test_stopped_export_leaves_nothing(checkpoint, tmp_path, number, delay):
    command = [sys.executable, "-c", "from kvconv.cli import main; main()", "export"]
    arguments = [str(checkpoint("llama")), "-o", str(tmp_path / "b"), "--no-verify"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("load ")
    time.sleep(delay)  # into tracing, where Python often drops what a signal raises
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert rest.strip() == ""
    assert list(tmp_path.iterdir()) == []
