"""`kvconv verify`: what it prints, records and refuses."""

import dataclasses
import errno
import json
import os
import shutil

import pytest
from click.testing import CliRunner

from kvconv.cli import main
from kvconv.errors import ModelNotFoundError
from kvconv.manifest import Manifest, Source, Verification, read_manifest
from kvconv.names import MODEL_FILE, WEIGHTS_FILE
from tiny_bundle import write_bundle
from wrong_bundles import change_weight, copy_wrong


@pytest.fixture
def bundle(exported, tmp_path):
    """Copy a bundle whose manifest says that it was never verified."""
    folder = shutil.copytree(exported("llama").path, tmp_path / "bundle")
    dataclasses.replace(read_manifest(folder), verification=Verification("skipped")).write(folder)
    return folder


def run(bundle, *arguments):
    return CliRunner().invoke(main, ["verify", str(bundle), "--threads", "1", *map(str, arguments)])


def status(bundle):
    return read_manifest(bundle).verification.status


def test_right_bundle_passes_and_the_manifest_says_so(bundle, checkpoint):
    result = run(bundle, "--model", checkpoint("llama"), "--prompt-tokens", 40)
    assert result.exit_code == 0, result.output
    found = read_manifest(bundle).verification
    assert found.status == "passed"
    assert found.checks[0].positions == 40
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"passed (float logits within {found.tolerance:.3g} ")
    assert len(lines) == 6
    assert all(line.startswith("  ok   ") and "max abs" in line for line in lines[1:])


def test_json_is_what_the_manifest_records(bundle, checkpoint):
    result = run(bundle, "--model", checkpoint("llama"), "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    document = json.loads(result.stdout)
    assert document.pop("bundle") == str(bundle)
    recorded = json.loads((bundle / "kvconv.json").read_text())["verification"]
    assert document == recorded
    assert recorded["status"] == "passed"


def test_wrong_bundle_exits_1_with_the_numbers_and_the_manifest_says_so(
    bundle, checkpoint, tmp_path
):
    wrong = copy_wrong(bundle, tmp_path / "wrong", change_weight)
    result = run(wrong, "--model", checkpoint("llama"))
    assert result.exit_code == 1
    verification = read_manifest(wrong).verification
    assert verification.status == "failed"
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    first = verification.checks[0]
    assert f"{first.max_abs:.3g} (tolerance {verification.tolerance:.3g})" in error
    assert result.stdout.startswith("failed")
    assert result.stdout.count("FAIL") == 5


def test_damaged_weights_are_found_and_nothing_is_recorded(bundle, checkpoint):
    with (bundle / WEIGHTS_FILE).open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"\x00\x01\x02\x03")
    result = run(bundle, "--model", checkpoint("llama"))
    assert result.exit_code == 1
    assert f"{WEIGHTS_FILE} in {bundle} is damaged: its sha256" in result.stderr
    assert status(bundle) == "skipped"


def test_local_model_must_be_given_and_is_not_looked_up(bundle, checkpoint, monkeypatch):
    # A folder of the recorded name in the current one may be another model.
    monkeypatch.chdir(checkpoint("llama").parent)
    assert read_manifest(bundle).source == Source("llama", "folder")
    result = run(bundle)
    assert result.exit_code == 2
    assert "exported from the folder llama. Say where it is with --model" in result.stderr
    assert status(bundle) == "skipped"


def test_another_model_is_refused_and_nothing_is_recorded(bundle, checkpoint):
    result = run(bundle, "--model", checkpoint("qwen3"))
    assert result.exit_code == 1
    assert "is Qwen3ForCausalLM, the bundle's is LlamaForCausalLM" in result.stderr
    assert status(bundle) == "skipped"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), ("someone/tiny", "c0ffee")),
        (("--model", "someone/else"), ("someone/else", None)),
    ],
)
def test_hub_model_is_fetched_at_the_recorded_revision(bundle, monkeypatch, arguments, wanted):
    source = Source("someone/tiny", "hub", revision="c0ffee")
    dataclasses.replace(read_manifest(bundle), source=source).write(bundle)
    asked = []

    def load_model(model, *, revision, **_):
        asked.append((model, revision))
        raise ModelNotFoundError("stop here", model=model)

    monkeypatch.setattr("kvconv.converter.load.load_model", load_model)
    assert "stop here" in run(bundle, *arguments).stderr
    assert asked == [wanted]


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_result_for_a_bundle_that_cannot_be_written_is_told(
    bundle, checkpoint, tmp_path, monkeypatch, right
):
    folder = bundle if right else copy_wrong(bundle, tmp_path / "wrong", change_weight)

    def refuse(self, folder):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr(Manifest, "write", refuse)
    result = run(folder, "--model", checkpoint("llama"))
    assert result.exit_code == (0 if right else 1)
    assert result.stdout.startswith("passed" if right else "failed")
    assert "not recorded in the manifest: Read-only file system\n" in result.stderr
    assert status(folder) == "skipped"


def test_incomplete_bundle_is_refused_before_the_model_is_loaded(tmp_path):
    bundle = write_bundle(tmp_path / "bundle")
    (bundle / MODEL_FILE).unlink()
    result = run(bundle, "--model", "absent")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: The bundle {bundle} is incomplete")
