"""Atomic writing: a bundle is complete under its name, or it is not there."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvconv.converter import bundle
from kvconv.errors import ExportError, OutputExistsError
from kvconv.names import MANIFEST_FILE

FILLER = """
import sys, time
from pathlib import Path
from kvconv.converter.bundle import new_bundle
with new_bundle(Path(sys.argv[1]), overwrite=False) as folder:
    (folder / "model.onnx").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def write(output, text, *, overwrite=False):
    with bundle.new_bundle(output, overwrite=overwrite) as folder:
        (folder / MANIFEST_FILE).write_text(manifest(text))


def manifest(text):
    return json.dumps({"files": {}, "text": text})


def read(output):
    return json.loads((output / MANIFEST_FILE).read_text())["text"]


def start_filling(output):
    process = subprocess.Popen(
        [sys.executable, "-c", FILLER, str(output)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["plain", "with space", "größe-漢字", "a/b/c"])
def test_bundle_appears_complete_under_its_name(tmp_path, name):
    output = tmp_path / name
    with bundle.new_bundle(output, overwrite=False) as folder:
        assert not output.exists()
        assert folder.parent == output.parent
        (folder / MANIFEST_FILE).write_text(manifest("new"))
    assert read(output) == "new"
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_error_leaves_nothing_behind(tmp_path):
    def fill_half():
        with bundle.new_bundle(tmp_path / "made/for/it", overwrite=False) as folder:
            (folder / "model.onnx").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_half()
    assert list(tmp_path.iterdir()) == []


def test_existing_bundle_is_refused_without_overwrite_before_the_block(tmp_path):
    write(tmp_path / "b", "old")
    with pytest.raises(OutputExistsError, match="--overwrite") as info:
        write(tmp_path / "b", "new")
    assert info.value.path == str(tmp_path / "b")
    assert read(tmp_path / "b") == "old"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_bundle_is_never_replaced(tmp_path, overwrite):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/precious.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("folder", "file"):
        with pytest.raises(OutputExistsError, match="not a bundle"):
            write(tmp_path / name, "new", overwrite=overwrite)
    assert (tmp_path / "folder/precious.txt").read_text() == "x"


def test_empty_folder_is_filled(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", "new")
    assert read(tmp_path / "b") == "new"


def test_overwrite_keeps_the_old_bundle_until_the_new_one_is_complete(tmp_path):
    output = tmp_path / "b"
    write(output, "old")
    with bundle.new_bundle(output, overwrite=True) as folder:
        (folder / MANIFEST_FILE).write_text(manifest("new"))
        assert read(output) == "old"
    assert read(output) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_failed_overwrite_keeps_the_old_bundle(tmp_path):
    write(tmp_path / "b", "old")
    with pytest.raises(RuntimeError), bundle.new_bundle(tmp_path / "b", overwrite=True):
        raise RuntimeError
    assert read(tmp_path / "b") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_failed_rename_puts_the_old_bundle_back(tmp_path, monkeypatch):
    output = tmp_path / "b"
    write(output, "old")
    rename = Path.rename

    def refuse_new(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "device error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="device error"):
        write(output, "new", overwrite=True)
    assert read(output) == "old"


def test_output_made_meanwhile_by_another_is_kept(tmp_path):
    output = tmp_path / "b"

    def fill_slowly():
        with bundle.new_bundle(output, overwrite=False) as folder:
            (folder / MANIFEST_FILE).write_text(manifest("ours"))
            write(output, "theirs")

    with pytest.raises(OutputExistsError):
        fill_slowly()
    assert read(output) == "theirs"


def test_parent_that_is_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputExistsError, match="cannot be written"):
        write(tmp_path / "file/b", "new")


def test_read_only_parent_is_refused_before_the_block(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OutputExistsError, match=r"Permission denied.*may write") as info:
        write(tmp_path / "b", "new")
    assert info.value.path == str(tmp_path / "b")


def test_killed_export_leaves_only_a_temporary_folder_which_the_next_one_cleans(tmp_path):
    output = tmp_path / "b"
    process = start_filling(output)
    process.kill()
    process.wait()
    assert [path.name for path in tmp_path.iterdir()] == [f".b.kvconv-{process.pid}.partial"]
    write(output, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_interrupted_export_leaves_nothing(tmp_path, signal_number):
    process = start_filling(tmp_path / "b")
    process.send_signal(signal_number)
    assert process.wait(30) != 0
    assert list(tmp_path.iterdir()) == []


def test_export_that_still_runs_is_left_alone(tmp_path):
    process = start_filling(tmp_path / "b")
    try:
        write(tmp_path / "b", "new")
        assert (tmp_path / f".b.kvconv-{process.pid}.partial/model.onnx").is_file()
    finally:
        process.kill()
        process.wait()


def test_bundle_moved_aside_by_a_killed_overwrite_comes_back(tmp_path):
    output = tmp_path / "b"
    process = start_filling(output)
    process.kill()
    process.wait()
    write(tmp_path / "old", "old")
    (tmp_path / "old").rename(tmp_path / f".b.kvconv-{process.pid}.replaced")
    with pytest.raises(OutputExistsError):
        write(output, "new")
    assert read(output) == "old"


def test_full_disk_is_refused_with_both_numbers(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    bundle.check_free_space(tmp_path / "x", 9 * 10**8)
    with pytest.raises(ExportError, match="1000 MB free .* about 1067 MB"):
        bundle.check_free_space(tmp_path / "x", 10**9)


def test_overwrite_keeps_files_that_are_not_the_bundles(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / MANIFEST_FILE).write_text('{"files": {"model.onnx": {}}}')
    (output / "model.onnx").write_text("graph")
    (output / "notes.txt").write_text("mine")
    with (
        pytest.raises(OutputExistsError, match=r"also holds notes\.txt"),
        bundle.new_bundle(output, overwrite=True),
    ):
        pytest.fail("the block must not run")
    assert (output / "notes.txt").read_text() == "mine"
    (output / MANIFEST_FILE).write_text("{}")
    with (
        pytest.raises(OutputExistsError, match="is damaged"),
        bundle.new_bundle(output, overwrite=True),
    ):
        pytest.fail("the block must not run")
