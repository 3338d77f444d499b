"""`kvconv run MODEL`: what is exported, what is found again, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvconv.cli import main, model_cache
from kvconv.cli.model_cache import ModelOptions, cache_folder, find_bundle
from kvconv.converter.bundle import new_bundle
from kvconv.errors import (
    BundleError,
    ExportError,
    MissingDependencyError,
    ModelNotFoundError,
    OutputExistsError,
)
from kvconv.manifest import read_manifest
from tiny_bundle import write_bundle

PLAIN = ModelOptions()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "kept bundles"
    monkeypatch.setenv("KVCONV_BUNDLES", str(folder))
    monkeypatch.delenv("KVCONV_CACHE_DIR", raising=False)
    return folder


@pytest.fixture
def exports(monkeypatch) -> list:
    """Replace the export by one that writes a tiny bundle; returns the calls."""
    calls = []

    def export(model, output, options, verifier, *, progress):
        calls.append((model, options))
        progress("load")
        with new_bundle(output, overwrite=False) as folder:
            write_bundle(folder)

    monkeypatch.setattr("kvconv.converter.export", export)
    return calls


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_bytes(b"123")
    return folder


def test_bundle_is_taken_as_it_is(tmp_path, exports, cache):
    bundle = write_bundle(tmp_path / "b")
    assert find_bundle(str(bundle), PLAIN) == bundle
    assert exports == []
    assert not cache.exists()


def test_export_options_beside_a_bundle_are_wrong_usage(tmp_path):
    bundle = str(write_bundle(tmp_path / "b"))
    with pytest.raises(click.UsageError, match="is a bundle already"):
        find_bundle(bundle, ModelOptions(dtype="float16"))
    result = CliRunner().invoke(main, ["run", bundle, "Hi", "--trust-remote-code"])
    assert (result.exit_code, result.stdout) == (2, "")


def test_model_is_exported_once(model, exports, cache, capsys):
    kept = find_bundle(str(model), PLAIN)
    assert read_manifest(kept)
    assert kept.parent == cache
    assert kept.name.startswith("my_model-")
    told = capsys.readouterr()
    assert told.out == ""
    assert "is no bundle: exporting it" in told.err
    assert "load " in told.err
    assert str(kept) in told.err
    assert find_bundle(str(model), PLAIN) == kept
    assert capsys.readouterr() == ("", "")
    assert len(exports) == 1


def test_same_model_by_another_path_is_the_same(model, exports, tmp_path, monkeypatch):
    kept = find_bundle(str(model), PLAIN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(model)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("my model", "./my model/", "link", "~/my model"):
        assert find_bundle(path, PLAIN) == kept
    assert find_bundle(str(model), ModelOptions(dtype="float32")) == kept
    assert len(exports) == 1


def _rewrite(path: Path, monkeypatch) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


def _other_version(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(model_cache, "__version__", "99")


@pytest.mark.parametrize(
    "change",
    [
        lambda path, _: path.write_bytes(b"1234"),
        _rewrite,
        lambda path, _: path.with_name("more").touch(),
        lambda path, _: path.unlink(),
        _other_version,
        lambda path, monkeypatch: monkeypatch.setattr(model_cache, "OP_VERSION", 99),
    ],
    ids=["size", "time", "new file", "file gone", "kvconv", "operator"],
)
def test_what_changed_is_exported_again(model, exports, monkeypatch, change):
    before = find_bundle(str(model), PLAIN)
    change(model / "weights", monkeypatch)
    assert find_bundle(str(model), PLAIN) != before
    assert len(exports) == 2


def test_options_and_folders_of_one_name_have_bundles_of_their_own(model, exports, tmp_path):
    other = shutil.copytree(model, tmp_path / "elsewhere" / model.name)
    kept = {
        find_bundle(str(path), options)
        for path in (model, other)
        for options in (PLAIN, ModelOptions(dtype="float16"), ModelOptions(trust_remote_code=True))
    }
    assert len(kept) == 6
    assert [options.dtype for _, options in exports] == ["float32", "float16", "float32"] * 2
    assert [options.trust_remote_code for _, options in exports] == [False, False, True] * 2


def test_gguf_file_counts_without_its_neighbours(tmp_path, exports):
    file = tmp_path / "a.b.gguf"
    file.write_bytes(b"GGUF")
    kept = find_bundle(str(file), PLAIN)
    assert kept.name.startswith("a.b-")
    (tmp_path / "other.gguf").write_bytes(b"x")
    assert find_bundle(str(file), PLAIN) == kept


def test_hub_id_is_exported_per_revision_and_found_without_the_hub(exports, monkeypatch):
    monkeypatch.setenv("KVCONV_CACHE_DIR", "hub files")
    kept = find_bundle("org/name", PLAIN)
    assert find_bundle("org/name", PLAIN) == kept
    assert find_bundle("org/name", ModelOptions(revision="v2")) != kept
    assert find_bundle("other/name", PLAIN) != kept
    assert [(name, options.revision) for name, options in exports] == [
        ("org/name", None), ("org/name", "v2"), ("other/name", None)
    ]  # fmt: skip
    assert exports[0][1].cache_dir == Path("hub files")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", ["kvconv.json", "config.json"]),
        ("ggufs", ["kvconv.json", "Did you mean", "m.gguf"]),
        ("notes.txt", ["kvconv.json", "config.json"]),
        ("absent", ["There is no file or folder", "kvconv.json", "hub id"]),
    ],
)
def test_neither_bundle_nor_model_is_refused_with_both_ways_out(tmp_path, exports, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "m.gguf").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFoundError) as caught:
        find_bundle(str(tmp_path / name), PLAIN)
    assert all(word in str(caught.value) for word in words), caught.value
    assert exports == []


def test_export_that_fails_keeps_nothing_and_says_where_more_options_are(model, cache, monkeypatch):
    def fail(model, output, *_, **__):
        with new_bundle(output, overwrite=False) as folder:
            (folder / "half").touch()
            raise ExportError("Say it with --max-sequence-length.")

    monkeypatch.setattr("kvconv.converter.export", fail)
    with pytest.raises(ExportError, match="--max-sequence-length. `kvconv export` takes more"):
        find_bundle(str(model), PLAIN)
    assert not cache.exists()


def test_other_process_that_was_faster_is_no_error(model, monkeypatch):
    def export(model, output, *_, **__):
        with new_bundle(output, overwrite=False) as folder:
            write_bundle(folder)
            write_bundle(output)  # by the other process

    monkeypatch.setattr("kvconv.converter.export", export)
    kept = find_bundle(str(model), PLAIN)
    assert read_manifest(kept)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_folder_in_the_way_that_is_no_bundle_is_an_error(model, exports, cache):
    kept = find_bundle(str(model), PLAIN)
    (kept / "kvconv.json").unlink()
    with pytest.raises(OutputExistsError, match="not a bundle.*KVCONV_BUNDLES"):
        find_bundle(str(model), PLAIN)


def test_missing_export_extra_names_the_command(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("kvconv.converter.load")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependencyError, match=r'pip install "kvconv\[cpu,export\]"'):
        find_bundle(str(model), PLAIN)


def test_damaged_kept_bundle_is_named(model, exports):
    kept = find_bundle(str(model), PLAIN)
    (kept / "model.onnx").unlink()
    result = CliRunner().invoke(main, ["run", str(model), "Hi", "--debug"])
    assert isinstance(result.exception, BundleError)
    assert str(kept) in str(result.exception)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"KVCONV_BUNDLES": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"KVCONV_BUNDLES": "~/b", "HOME": "/h"}, "/h/b"),
        ({"KVCONV_BUNDLES": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/kvconv/bundles"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/kvconv/bundles"),
        ({"HOME": "/h"}, "/h/.cache/kvconv/bundles"),
    ],
    ids=str,
)
def test_cache_folder_follows_the_environment(monkeypatch, variables, folder):
    for name in ("KVCONV_BUNDLES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_doctor_shows_the_kept_bundles(model, exports, cache):
    find_bundle(str(model), PLAIN)
    find_bundle("org/name", PLAIN)
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert report["bundle_cache"] == {"path": str(cache), "num_bundles": 2, "size_bytes": size}
    shown = CliRunner().invoke(main, ["doctor"]).stdout
    assert f"kept bundles 2, {size / 1e6:.0f} MB in {cache}" in shown


def test_prompts_are_read_before_a_model_is_exported(model, exports):
    result = CliRunner().invoke(main, ["run", str(model), "--prompts", "-"], input=b"a\n\xff")
    assert result.exit_code == 1
    assert "line 2" in result.stderr
    assert exports == []


def test_checkpoint_runs_at_once_the_second_time(checkpoint, cache):
    model = str(checkpoint("llama", num_hidden_layers=1))
    options = ["Hello", "--max-new-tokens", "5", "--json", "--threads", "1"]
    first = CliRunner().invoke(main, ["run", model, *options])
    assert first.exit_code == 0, first.output
    assert "verify " in first.stderr
    [kept] = cache.iterdir()
    assert read_manifest(kept).verification.status == "passed"
    script = (
        "import sys\n"
        "from kvconv.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "sys.exit(sorted({'torch', 'transformers', 'onnx', 'huggingface_hub'} & set(sys.modules)) "
        "or 0)"
    )
    command = [sys.executable, "-c", script, "run", model, *options]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == first.stdout


def test_damaged_kept_bundle_says_what_to_remove(exports, model):
    kept = find_bundle(str(model), PLAIN)
    (kept / "model.onnx").write_bytes(b"")
    result = CliRunner().invoke(main, ["run", str(model), "Hi"])
    assert result.exit_code == 1
    assert f"remove {kept}" in result.stderr
    shutil.rmtree(kept)
    assert CliRunner().invoke(main, ["run", str(model), "Hi"]).exit_code == 0
