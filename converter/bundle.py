"""Writes a bundle folder all at once: it is complete under its name, or it is not there.

Work happens in a temporary folder beside the output, on the same file system, named after the
output and this process. An error, Ctrl-C or a termination signal removes it; one that a killed
process left behind is removed by the next export to the same place.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvconv.converter.signals import stoppable
from kvconv.errors import ExportError, OutputExistsError
from kvconv.manifest import FileEntry, file_entry
from kvconv.names import MANIFEST_FILE

_SPARE_BYTES = 64 * 1024 * 1024
"""Room for the tokenizer, the graph and the op library, beside the weights."""


@contextlib.contextmanager
def new_bundle(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder to fill; it becomes the bundle when the block ends well.

    Args:
        output: Where the bundle will be; missing parents are made.
        overwrite: Whether a bundle that is there may be replaced. It stays in place until the new
            one is complete.

    Raises:
        OutputExistsError: Something is there that may not be replaced, or the place cannot be
            written. Raised before the block runs.
    """
    output = output.resolve()
    made_parents = _make_parents(output)
    try:
        _clean_leftovers(output)
        _check_replaceable(output, overwrite=overwrite)
        partial = _sibling(output, "partial")
        try:
            partial.mkdir()
        except OSError as error:
            raise _cannot_write(output, error) from error
        try:
            with stoppable():
                yield partial
                _put_in_place(partial, output, overwrite=overwrite)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        for parent in made_parents:
            with contextlib.suppress(OSError):  # it is no longer empty: the bundle is in it
                parent.rmdir()


def check_free_space(folder: Path, weight_bytes: int) -> None:
    """Refuse weights that will not fit on the disk.

    Raises:
        ExportError: The disk has less room than weights and a reserve need.
    """
    needed, free = weight_bytes + _SPARE_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(
            f"The disk of {folder.parent} has {free / 1e6:.0f} MB free and the bundle needs about "
            f"{needed / 1e6:.0f} MB. Free some space, or choose a folder on another disk."
        )


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Measure and hash every file of a bundle except its manifest, by name."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST_FILE)
    return {path.name: file_entry(path) for path in paths}


def _check_replaceable(output: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(output):
        return
    if output.is_dir() and not output.is_mount() and not any(output.iterdir()):
        return
    if output.is_mount():
        raise OutputExistsError(
            f"{output} is where a file system is mounted, so it cannot be replaced. Choose a "
            f"folder inside it.",
            path=str(output),
        )
    if not (output / MANIFEST_FILE).is_file():
        raise OutputExistsError(
            f"{output} exists and is not a bundle, so it will not be replaced. Choose another "
            f"output, or move it away.",
            path=str(output),
        )
    if not overwrite:
        raise OutputExistsError(
            f"There is a bundle at {output} already. Pass --overwrite to replace it, or choose "
            f"another output.",
            path=str(output),
        )
    _check_holds_a_bundle_only(output)


def _check_holds_a_bundle_only(output: Path) -> None:
    """Refuse to replace a folder with files in it that no export wrote."""
    try:
        document = json.loads((output / MANIFEST_FILE).read_bytes())
        listed = {MANIFEST_FILE, *document["files"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OutputExistsError(
            f"{output / MANIFEST_FILE} is damaged, so it does not say which files of {output} are "
            f"a bundle's, and none is replaced. Remove the folder, or choose another output.",
            path=str(output),
        ) from error
    others = sorted(path.name for path in output.iterdir() if path.name not in listed)
    if others:
        raise OutputExistsError(
            f"{output} also holds {', '.join(others[:3])}, which is not part of the bundle, so it "
            f"will not be replaced. Move it elsewhere, or choose another output.",
            path=str(output),
        )


def _make_parents(output: Path) -> list[Path]:
    """Make missing parent folders; returns those made, innermost first."""
    missing = []
    parent = output.parent
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(output, error) from error
    return missing


def _cannot_write(output: Path, error: OSError) -> OutputExistsError:
    return OutputExistsError(
        f"{output} cannot be written: {error.strerror} ({error.filename}). Choose a folder that "
        f"you may write to.",
        path=str(output),
    )


def _sibling(output: Path, role: str) -> Path:
    return output.with_name(f".{output.name}.kvconv-{os.getpid()}.{role}")


def _clean_leftovers(output: Path) -> None:
    """Remove what killed exports to this place left; bring back a bundle they had moved aside."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.kvconv-(\d+)\.(partial|replaced)")
    for path in output.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        if match[2] == "replaced" and not output.exists():
            path.rename(output)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # an earlier export of this very process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _put_in_place(partial: Path, output: Path, *, overwrite: bool) -> None:
    """Rename the finished folder to its name; an old bundle is removed only afterwards."""
    _check_replaceable(output, overwrite=overwrite)  # somebody may have been faster
    replaced = _sibling(output, "replaced")
    if not output.exists():
        partial.rename(output)
        return
    output.rename(replaced)
    try:
        partial.rename(output)
    except OSError:
        replaced.rename(output)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
