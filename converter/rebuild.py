"""Compiles the CUDA kernels of a bundle that is there, for other GPUs or by a newer kvconv."""

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path

from kvconv import __version__, names
from kvconv.converter.bundle import new_bundle
from kvconv.converter.kernel_input import attach
from kvconv.converter.options import KernelBuilder
from kvconv.errors import BundleError
from kvconv.manifest import Manifest, check_files, file_entry, read_manifest

_REBUILT = frozenset({names.MANIFEST_FILE, names.MODEL_FILE, names.KERNELS_FILE})


def rebuild(folder: Path, kernels: KernelBuilder) -> Manifest:
    """Compile a bundle's kernels anew; the bundle is the old one until the new one is complete.

    Args:
        folder: A bundle for CUDA.
        kernels: Compiles them.

    Raises:
        BundleError: It is no bundle, a damaged one, or one for the CPU.
        MissingDependencyError: There is no compiler.
        ExportError: An attention has a shape that kvconv has no CUDA kernels for.
        OutputExistsError: The bundle cannot be replaced.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    if manifest.kernels is None:
        raise BundleError(
            f"{folder} is a bundle for the CPU, whose graph CUDA kernels cannot serve. Export the "
            f"model for CUDA: kvconv export MODEL -o BUNDLE --provider cuda",
            file=str(folder),
        )
    content, built = kernels.build(folder / names.MODEL_FILE)
    with new_bundle(folder, overwrite=True) as partial:
        for name in manifest.files.keys() - _REBUILT:
            _link(folder / name, partial / name)
        (partial / names.KERNELS_FILE).write_bytes(content)
        shutil.copyfile(folder / names.MODEL_FILE, partial / names.MODEL_FILE)
        attach(partial / names.MODEL_FILE, len(content))
        changed = {
            name: file_entry(partial / name) for name in (names.MODEL_FILE, names.KERNELS_FILE)
        }
        manifest = dataclasses.replace(
            manifest,
            kernels=built,
            op_version=names.OP_VERSION,
            files=dict(sorted({**manifest.files, **changed}.items())),
            kvconv_version=__version__,
        )
        manifest.write(partial)
    return manifest


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; weights take no room twice."""
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)  # file systems without links
