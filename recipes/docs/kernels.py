"""Compiles a representative set of CUDA kernels, and prints docs/kernels.md: `make kernels`."""

import sys
import time

from kvconv.custom_ops.triton.compile import MAX_SPILL_BYTES, Compiled
from kvconv.custom_ops.triton.variants import (
    DTYPE_NAMES,
    GPUS,
    Attention,
    Feature,
    Kind,
    Variant,
    list_variants,
)
from kvconv.custom_ops.triton.worker import compile_variants

FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 = 1, 10, 16, 3, 2
LLAMA = Feature.ROTARY | Feature.MASK | Feature.CAUSAL
ATTENTIONS = [
    *(
        Attention(FLOAT16, cache, width, width, 4, width, LLAMA)
        for width in (64, 128, 256)
        for cache in (FLOAT16, INT8, INT4)
    ),
    *(Attention(FLOAT16, FLOAT16, width, width, 1, width, LLAMA) for width in (80, 96)),
    Attention(FLOAT16, FLOAT16, 192, 128, 1, 64, LLAMA),
    Attention(BFLOAT16, BFLOAT16, 128, 128, 4, 128, LLAMA),
    Attention(FLOAT32, FLOAT32, 128, 128, 4, 128, LLAMA),
    Attention(FLOAT16, FLOAT16, 128, 128, 4, 128, LLAMA | Feature.SINK | Feature.WINDOW),
    Attention(FLOAT16, FLOAT16, 256, 256, 4, 256, LLAMA | Feature.WINDOW | Feature.RING),
]
"""Widths of heads and types of caches that models have, most with what Llama's nodes have."""
EVERYWHERE = [attention for attention in ATTENTIONS if attention.cache_type == FLOAT16][:1]
"""Those compiled for all GPUs and as PTX; of the others prefill and decode for `ONE_GPU`."""
ONE_GPU = "sm_90"

HEADER = """# CUDA kernels

What `make kernels` compiled, without a GPU: a representative set. A bundle has the kernels of its
own nodes only. Each kernel is checked when it is compiled: its shared memory fits the GPU, it takes
no scratch memory, and a thread keeps at most {spill} bytes in local memory. Speed on a GPU is what
`make gpu-check` measures.

Columns: tile (new tokens x slots), warps of a block, registers and spilled bytes of a thread,
shared memory of a block and size of the image in KiB. PTX has no registers yet; the driver chooses
them.

"""
COLUMNS = (
    "kernel", "GPU", "dtype", "cache", "head_dim", "features", "tile", "warps", "registers",
    "spilled", "shared", "size",
)  # fmt: skip


def main() -> None:
    """Print the table; a summary goes to stderr."""
    started = time.perf_counter()
    variants = [
        variant
        for variant in list_variants(ATTENTIONS, GPUS)
        if variant.attention in EVERYWHERE
        or (variant.gpu == GPUS[ONE_GPU] and variant.kind in (Kind.PREFILL, Kind.DECODE))
    ]
    compiled = sorted(compile_variants(variants), key=lambda kernel: variants.index(kernel.variant))
    print(HEADER.format(spill=MAX_SPILL_BYTES), end="")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for kernel in compiled:
        print(row(kernel))
    size = sum(len(kernel.image) for kernel in compiled)
    spilling = sum(kernel.spill_bytes > 0 for kernel in compiled)
    print(
        f"{len(compiled)} kernels, {size / 1e6:.1f} MB, {spilling} spill, "
        f"{time.perf_counter() - started:.0f} s",
        file=sys.stderr,
    )


def row(kernel: Compiled) -> str:
    """Return a kernel's line of the table."""
    variant: Variant = kernel.variant
    attention, tile = variant.attention, variant.tile
    width = str(attention.head_dim)
    if attention.value_head_dim != attention.head_dim:
        width += f"/{attention.value_head_dim}"
    features = ", ".join(str(feature.name).lower() for feature in attention.features)
    cells = (
        variant.kind.name.lower(),
        "PTX" if variant.is_ptx else f"sm_{variant.gpu.compute_capability}",
        DTYPE_NAMES[attention.activation_type],
        DTYPE_NAMES[attention.cache_type],
        width,
        features,
        f"{tile.m} x {tile.n}" if variant.kind in (Kind.PREFILL, Kind.DECODE) else "",
        kernel.num_warps,
        kernel.registers or "",
        "" if variant.is_ptx else kernel.spill_bytes,
        f"{kernel.shared_bytes / 1024:.1f}",
        f"{len(kernel.image) / 1024:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
