"""Compiles one kernel for one GPU, which need not be there, and checks what comes out."""

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvconv.custom_ops.triton.arguments import ALIGNMENT, ARGUMENTS
from kvconv.custom_ops.triton.variants import Variant
from kvconv.errors import ExportError, MissingDependencyError, root_cause

MAX_SPILL_BYTES = 512
"""What a thread may keep in local memory; more would cost much of what registers gain."""
PTX_VERSION = 74
"""PTX of CUDA 11.4: any driver that runs ONNX Runtime's provider compiles it."""
_WARP_SIZE = 32


class Compiled(NamedTuple):
    """A kernel's image, and what its launch needs.

    Attributes:
        variant: What was compiled.
        image: Machine code, or PTX text with a final zero.
        function: The name in the image.
        num_warps: Warps of a block; the compiler may choose more than were asked for.
        shared_bytes: Shared memory of a block.
        registers: Of a thread; 0 for PTX.
        spill_bytes: Local memory of a thread; 0 for PTX.
    """

    variant: Variant
    image: bytes
    function: str
    num_warps: int
    shared_bytes: int
    registers: int
    spill_bytes: int


def set_environment() -> None:
    """Set what Triton reads when it is imported; to be called before that.

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    # Kernels that are to be compiled must not be decorated for the interpreter.
    os.environ.pop("TRITON_INTERPRET", None)
    # Line tables hold paths, and are most of a cubin.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    # Triton has a ptxas of its own for 9.0 and newer, whose cubins only drivers of CUDA 13 load.
    # The older one knows these GPUs as well, and drivers of CUDA 12 load what it makes.
    os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = str(_tool("ptxas"))


def load_kernel(variant: Variant) -> Any:
    """Return the Triton function of a variant's kind."""
    name = variant.kind.name.lower()
    module = importlib.import_module(f"kvconv.custom_ops.triton.{name}")
    return getattr(module, f"{name}_kernel")


def compile_variant(variant: Variant, kernel: Callable[[Variant], Any] = load_kernel) -> Compiled:
    """Compile a kernel and check what comes out.

    Args:
        variant: What to compile; `set_environment` has been called.
        kernel: Gives the Triton function.

    Raises:
        ExportError: It cannot be compiled, or does not fit the GPU; names the variant.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernel(variant)
    signature, constants, attributes = _source(variant, function.arg_names)
    tile = variant.tile
    options: dict[str, Any] = {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
    if variant.is_ptx:
        options["ptx_version"] = PTX_VERSION
    try:
        compiled = triton.compile(
            ASTSource(function, signature, constants, attributes),
            target=GPUTarget("cuda", variant.gpu.compute_capability, _WARP_SIZE),
            options=options,
        )
    except Exception as error:  # Triton's own, and those of LLVM and ptxas
        raise ExportError(
            f"The kernel {variant} does not compile: {root_cause(error)} Please report this; "
            f"meanwhile export for the CPU, without --provider cuda."
        ) from error
    metadata = compiled.metadata
    cubin = compiled.asm["cubin"]
    registers, spill_bytes = _resources(cubin)
    _check(variant, metadata, spill_bytes)
    if variant.is_ptx:
        return Compiled(
            variant, compiled.asm["ptx"].encode() + b"\0", metadata.name, metadata.num_warps,
            metadata.shared, 0, 0,
        )  # fmt: skip
    return Compiled(
        variant, cubin, metadata.name, metadata.num_warps, metadata.shared, registers, spill_bytes
    )


def _source(
    variant: Variant, parameters: list[str]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Return signature, constants and divisibilities as Triton's ASTSource takes them."""
    types, constants = variant.signature, variant.constants
    missing = [name for name in (*types, *constants) if name not in parameters]
    if missing:
        raise ExportError(f"The kernel {variant} has no parameters {', '.join(missing)}.")
    signature = {name: types.get(name, "constexpr") for name in parameters}
    values: dict[tuple[int], Any] = {}
    divisible: dict[tuple[int], Any] = {}
    for index, name in enumerate(parameters):
        if name not in types:
            values[(index,)] = constants.get(name)
        elif ARGUMENTS[name].aligned:
            divisible[(index,)] = [["tt.divisibility", ALIGNMENT]]
    return signature, values, divisible


def _check(variant: Variant, metadata: Any, spill_bytes: int) -> None:
    limits = (
        ("bytes of shared memory", metadata.shared, variant.gpu.max_shared_bytes),
        ("bytes of global scratch memory", metadata.global_scratch_size, 0),
        ("bytes of profiling scratch memory", metadata.profile_scratch_size, 0),
        ("bytes of spilled registers", spill_bytes, MAX_SPILL_BYTES),
    )
    for what, value, most in limits:
        if value > most:
            raise ExportError(
                f"The kernel {variant} takes {value} {what}; at most {most} can be. Please report "
                f"this; meanwhile export for the CPU, without --provider cuda."
            )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(_tool("cuobjdump")), "-res-usage", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing.stdout + listing.stderr)
    if found is None:
        raise ExportError(f"cuobjdump does not say what a kernel takes: {listing.stdout!r}.")
    return int(found[1]), int(found[2])


def require_triton() -> Path:
    """Return where Triton is, without importing it.

    Raises:
        MissingDependencyError: It is not installed.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(package="triton", extra="build")
    return Path(spec.origin).parent


def _tool(name: str) -> Path:
    """Return a program that comes with Triton."""
    return require_triton() / "backends" / "nvidia" / "bin" / name
