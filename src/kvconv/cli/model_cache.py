"""The bundle behind `kvconv run MODEL`: the folder given, or one exported once and kept.

A kept bundle's name holds a digest of everything that it was made from: the model's files with size
and time, or its hub id and revision; the options; the versions of kvconv and of its operator. What
changes gets a bundle of its own. Finding one imports nothing heavy and asks no network.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvconv import __version__
from kvconv.cli.common import (
    HUB_CACHE_VARIABLE,
    Dtype,
    needs_extra,
    print_status,
    revision_option,
    trust_remote_code_option,
)
from kvconv.errors import BundleError, ExportError, ModelNotFoundError, OutputExistsError
from kvconv.manifest import ActivationDtype
from kvconv.names import MANIFEST_FILE, OP_VERSION

BUNDLES_VARIABLE = "KVCONV_BUNDLES"

_OPTIONS = (
    click.option(
        "--dtype", type=Dtype(["float32", "float16"]), metavar="DTYPE",
        help="float32 or float16: how a model that is no bundle is exported. [default: float32]",
    ),
    revision_option,
    trust_remote_code_option,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What `kvconv run` can say about the export of a model; None and False are not said."""

    dtype: ActivationDtype | None = None
    revision: str | None = None
    trust_remote_code: bool = False


class CacheUsage(NamedTuple):
    """What the kept bundles take: how many, and their bytes."""

    num_bundles: int
    size_bytes: int


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that `ModelOptions` holds."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def find_bundle(model: str, options: ModelOptions) -> Path:
    """Return the bundle of what `kvconv run` was given; exports a model the first time.

    Args:
        model: A bundle, a folder made by save_pretrained, a .gguf file, or a hub id.
        options: For the export; nothing may be said of a bundle.

    Raises:
        click.UsageError: Options were given, and it is a bundle.
        ModelNotFoundError: It is neither a bundle nor a model.
        KvconvError: The export failed; nothing is kept.
    """
    path = Path(os.path.expanduser(model))  # the ~ of an unknown user stays
    if (path / MANIFEST_FILE).is_file():
        if options != ModelOptions():
            raise click.UsageError(
                f"{model} is a bundle already; --dtype, --revision and --trust-remote-code say how "
                f"a model is exported."
            )
        return path
    kept = cache_folder() / _name(model, path, options)
    if not (kept / MANIFEST_FILE).is_file():
        _export(model, kept, options)
    return kept


@contextlib.contextmanager
def kept_bundle_remedy(model: str, bundle: Path) -> Iterator[None]:
    """Say of a damaged bundle in the block what helps, if it is a kept one.

    Args:
        model: What `find_bundle` was given.
        bundle: What it returned.
    """
    try:
        yield
    except BundleError as error:
        if bundle.parent != cache_folder():
            raise
        raise BundleError(
            f"{error} It is the bundle kept of {model}: remove {bundle}, and the next run exports "
            f"the model again.",
            file=error.file,
        ) from error


def cache_folder() -> Path:
    """Return where bundles are kept; it need not exist."""
    chosen = os.environ.get(BUNDLES_VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")  # which the standard wants ignored if relative
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvconv" / "bundles"


def cache_usage() -> CacheUsage:
    """Measure the kept bundles."""
    folder = cache_folder()
    num_bundles = sum(1 for _ in folder.glob(f"*/{MANIFEST_FILE}"))
    return CacheUsage(num_bundles, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))


def _name(model: str, path: Path, options: ModelOptions) -> str:
    """Return a kept bundle's folder name, for people and for looking it up."""
    facts = {
        "model": _identity(model, path, options.revision),
        "options": asdict(options) | {"dtype": options.dtype or "float32"},
        "versions": [__version__, OP_VERSION],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    readable = path.resolve().stem if path.is_file() else (path.resolve().name or "model")
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', readable)[:64]}-{digest[:16]}"


def _identity(model: str, path: Path, revision: str | None) -> list[Any]:
    """Return what tells a model from all others, and from itself after a change.

    Raises:
        ModelNotFoundError: It is no model.
    """
    from kvconv.converter.model_name import parse_model_name

    try:
        name = parse_model_name(model, revision)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error} A bundle is a folder with a {MANIFEST_FILE}; `kvconv export` makes one.",
            model=model,
        ) from error
    if name.kind == "hub":
        return ["hub", model]
    files = [path] if name.kind == "gguf" else sorted(f for f in path.iterdir() if f.is_file())
    stats = [(file.name, file.stat()) for file in files]
    times = [[file_name, stat.st_size, stat.st_mtime_ns] for file_name, stat in stats]
    return ["files", str(path.resolve()), times]


def _export(model: str, output: Path, options: ModelOptions) -> None:
    print_status(f"{model} is no bundle: exporting it as a model, once")
    hub_cache = os.environ.get(HUB_CACHE_VARIABLE)
    with needs_extra("cpu,export"):
        from kvconv.cli.stages import StageLines
        from kvconv.converter import ExportOptions, export
        from kvconv.verify import Verifier

        export_options = ExportOptions(
            dtype=options.dtype or "float32",
            revision=options.revision,
            cache_dir=Path(hub_cache) if hub_cache else None,
            trust_remote_code=options.trust_remote_code,
        )
        try:
            with StageLines() as stages:
                export(model, output, export_options, Verifier(), progress=stages)
        except OutputExistsError as error:
            # With a bundle there, another process exported the same and was faster.
            if not (output / MANIFEST_FILE).is_file():
                raise OutputExistsError(
                    f"{error} {BUNDLES_VARIABLE} names the folder for kept bundles.",
                    path=error.path,
                ) from error
        except ExportError as error:
            raise ExportError(
                f"{error} `kvconv export` takes more options; then run the bundle that it writes."
            ) from error
    print_status(f"bundle         {output}")
