"""`kvconv doctor`: versions, providers, the op library in use, and what is missing."""

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import click

from kvconv import __version__
from kvconv.cli.common import Command, extras, one_line, print_json
from kvconv.cli.model_cache import CacheUsage, cache_folder, cache_usage
from kvconv.errors import LibraryError
from kvconv.names import OP_DOMAIN, OP_VERSION

_USED_FOR = {"cpu": "run", "export": "export"}


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@click.option(
    "--cmake-dir", is_flag=True, help="Print the folder for find_package(kvconv), and nothing else."
)
def command(as_json: bool, cmake_dir: bool) -> None:
    """Show versions, providers, the op library in use, and what is missing.

    Put its output into every bug report. Exit code 0 even when something is missing.
    """
    if cmake_dir:
        from kvconv import custom_ops

        click.echo(custom_ops.cmake_folder())
        return
    report = diagnose()
    if as_json:
        print_json(report)
        return
    click.echo(f"kvconv       {report['kvconv']}  (operator domain {OP_DOMAIN} {OP_VERSION})")
    click.echo(f"python       {report['python']}")
    click.echo(f"platform     {report['platform']}, {report['cores']} cores")
    for name, version in report["packages"].items():
        click.echo(f"{name:<20} {version or 'not installed'}")
    click.echo(f"providers    {', '.join(report['providers']) or 'none'}")
    click.echo(f"cuda         {report['cuda'] or 'available'}")
    click.echo(f"op library   {report['op_library'] or 'not found'}")
    cache = report["bundle_cache"]
    size_mb = cache["size_bytes"] / 1e6
    click.echo(f"kept bundles {cache['num_bundles']}, {size_mb:.0f} MB in {cache['path']}")
    for problem in report["problems"]:
        click.echo(f"problem: {problem}")
    if not report["problems"]:
        click.echo("nothing is missing")


def diagnose() -> dict[str, Any]:
    """Gather what `doctor` prints; loads onnxruntime and registers the op library once."""
    wanted = {extra: extras()[extra] for extra in _USED_FOR}
    names = {name for needed in wanted.values() for name in needed} | {"onnxruntime-gpu"}
    packages = {name: _version(name) for name in sorted(names)}
    problems = []
    if packages["onnxruntime"] and packages["onnxruntime-gpu"]:
        problems.append(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other. "
            "Uninstall both, then install the one you want."
        )
    has_runtime = bool(packages["onnxruntime"] or packages["onnxruntime-gpu"])
    for extra, needed in wanted.items():
        missing = [
            name
            for name in needed
            if not packages[name] and not (name == "onnxruntime" and has_runtime)
        ]
        if missing:
            problems.append(
                f"{', '.join(missing)} not installed, needed to {_USED_FOR[extra]}: "
                f'pip install "kvconv[{extra}]"'
            )
    providers: list[str] = []
    if has_runtime:
        try:
            import onnxruntime

            providers = onnxruntime.get_available_providers()
        except (ImportError, AttributeError) as error:
            has_runtime = False
            problems.append(f"onnxruntime is installed but broken ({error}): install it again")
    library, library_problem = _op_library(has_runtime)
    if library_problem:
        problems.append(library_problem)
    cuda: str | None = "not available: onnxruntime is missing"
    if has_runtime:
        with contextlib.suppress(ImportError):  # numpy is missing, as the problems say
            from kvconv.runtime.cuda import why_unavailable

            why = why_unavailable()
            cuda = None if why is None else f"not available: {why}"
    try:
        usage = cache_usage()
    except OSError as error:
        usage = CacheUsage(0, 0)
        problems.append(f"the folder for kept bundles cannot be read: {one_line(error)}")
    return {
        "kvconv": __version__,
        "op_version": OP_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "packages": packages,
        "providers": providers,
        "cuda": cuda,
        "op_library": str(library) if library else None,
        "bundle_cache": {"path": str(cache_folder()), **usage._asdict()},
        "problems": problems,
    }


def _op_library(has_runtime: bool) -> tuple[Path | None, str | None]:
    """Return the library's path and, if it cannot be used, why."""
    from kvconv import custom_ops

    try:
        library = custom_ops.library_path()
    except LibraryError as error:
        return None, str(error)
    if has_runtime:
        import onnxruntime

        try:
            custom_ops.register(onnxruntime.SessionOptions())
        except LibraryError as error:
            return library, str(error)
    return library, None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
