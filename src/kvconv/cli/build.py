"""`kvconv build`: compile the CUDA kernels of a bundle."""

import time
from pathlib import Path

import click

from kvconv.cli.common import Command, needs_extra, print_json, print_status
from kvconv.names import KERNELS_FILE


@click.command(cls=Command, context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--gpu", "gpus", metavar="SM,SM,...",
    help="GPUs to compile for, such as sm_80,sm_90. Default: all that kvconv knows.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def command(bundle: Path, gpus: str | None, as_json: bool) -> None:
    """Compile the CUDA kernels of BUNDLE again, for other GPUs or with a newer kvconv.

    BUNDLE was made by `kvconv export --provider cuda`, which compiles them for all GPUs that kvconv
    knows. Takes no GPU and no CUDA toolkit. What is not compiled for runs PTX, which the driver
    compiles when it first loads it. The same bundle and GPUs give the same bytes.
    """
    started = time.perf_counter()
    with needs_extra("cpu,export,build"):
        from kvconv.converter.kernel_builder import TritonKernels
        from kvconv.converter.rebuild import rebuild

        kernels = TritonKernels(tuple(gpus.split(",")) if gpus is not None else ())
        print_status(f"compiling for {', '.join(kernels.gpus)}")
        manifest = rebuild(bundle, kernels)
    assert manifest.kernels is not None
    seconds = time.perf_counter() - started
    size_bytes = manifest.files[KERNELS_FILE].size
    if as_json:
        print_json(
            {
                "bundle": str(bundle),
                "gpus": manifest.kernels.gpus,
                "num_kernels": manifest.kernels.num_kernels,
                "size_bytes": size_bytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    click.echo(
        f"{manifest.kernels.num_kernels} kernels for {', '.join(manifest.kernels.gpus)} and PTX, "
        f"{size_bytes / 1e6:.1f} MB in {KERNELS_FILE}, {seconds:.1f} s"
    )
