"""Opening bundles that are whole, and refusing those that are not, by file."""

import dataclasses
import json

import pytest

from kvconv import names
from kvconv.errors import BundleError
from kvconv.manifest import FORMAT_VERSION, FileEntry, check_files, read_manifest
from kvconv.runtime.bundle import Bundle
from tiny_bundle import write_bundle


@pytest.fixture
def folder(tmp_path):
    return write_bundle(tmp_path / "ein Bündel 模型")


def refused(folder) -> BundleError:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    return caught.value


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def test_open_reads_the_manifest_and_finds_files(folder):
    bundle = Bundle.open(str(folder))
    assert bundle.manifest == read_manifest(folder)
    assert bundle.file("tokenizer.json") == folder / "tokenizer.json"
    assert "tokenizer.json" in bundle
    assert bundle.read_json("tokenizer_config.json")["bos_token"] == "<s>"


def test_moved_bundle_opens(folder, tmp_path):
    moved = folder.rename(tmp_path / "moved")
    assert Bundle.open(moved).path == moved


def test_missing_folder_says_how_to_make_one(tmp_path):
    assert "kvconv export" in str(refused(tmp_path / "nothing"))


def test_folder_without_manifest_is_refused(tmp_path):
    assert refused(tmp_path).file == names.MANIFEST_FILE


@pytest.mark.parametrize("name", ["kvconv.json", "model.onnx", "tokenizer.json"])
def test_one_changed_byte_names_the_file(folder, name):
    flip_last_byte(folder / name)
    assert refused(folder).file == name


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "chat_template.jinja"])
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert refused(folder).file == name


def test_truncated_file_says_both_sizes(folder):
    path = folder / "model.onnx"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    error = refused(folder)
    assert error.file == "model.onnx"
    assert f"{size - 10} bytes" in str(error)
    assert str(size) in str(error)


def test_newer_format_says_to_upgrade(folder):
    path = folder / names.MANIFEST_FILE
    document = json.loads(path.read_text())
    document["format_version"] = FORMAT_VERSION + 1
    document["invented_later"] = {}
    path.write_text(json.dumps(document))
    assert "Upgrade kvconv" in str(refused(folder))


def test_manifest_that_lists_files_elsewhere_is_refused(folder):
    outside = folder.parent / "secret"
    outside.write_text("x")
    manifest = read_manifest(folder)
    files = {**manifest.files, "../secret": FileEntry(1, "0" * 64)}
    dataclasses.replace(manifest, files=files).write(folder)
    assert refused(folder).file == names.MANIFEST_FILE


def test_manifest_without_a_model_is_refused(folder):
    manifest = read_manifest(folder)
    files = {name: entry for name, entry in manifest.files.items() if name != names.MODEL_FILE}
    dataclasses.replace(manifest, files=files).write(folder)
    assert refused(folder).file == names.MODEL_FILE


def test_unlisted_file_is_not_read(folder):
    (folder / "extra.json").write_text("{}")
    bundle = Bundle.open(folder)
    assert "extra.json" not in bundle
    with pytest.raises(BundleError):
        bundle.read_json("extra.json")


@pytest.mark.parametrize("content", ["[1]", "{", "\ufffd"])
def test_json_that_is_no_object_names_the_file(folder, content):
    bundle = Bundle.open(folder)
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(BundleError) as caught:
        bundle.read_json("tokenizer_config.json")
    assert caught.value.file == "tokenizer_config.json"


def test_large_files_are_hashed_only_when_all_are(folder, monkeypatch):
    monkeypatch.setattr("kvconv.manifest.HASHED_ON_OPEN_BYTES", 100)
    flip_last_byte(folder / "model.onnx")
    bundle = Bundle.open(folder)
    with pytest.raises(BundleError, match=r"model\.onnx"):
        check_files(folder, bundle.manifest, hash_all=True)
