"""Kernels with the parameters of `combine`, to test how kernels are compiled and checked."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    head_sink, output, partial_output, partial_maximum, partial_sum, num_heads, num_splits,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr, CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The first split is the output; a sink, where there is one, is added."""
    row = tl.program_id(1) * num_heads + tl.program_id(0)
    columns = row * VALUE_HEAD_DIM + tl.arange(0, VALUE_HEAD_DIM)
    total = tl.load(partial_output + columns) / tl.load(partial_sum + row)
    if FEATURES & 32:
        total += tl.load(head_sink + tl.program_id(0))
    tl.store(output + columns, total)


@triton.jit
def large_kernel(
    head_sink, output, partial_output, partial_maximum, partial_sum, num_heads, num_splits,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr, CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """A product whose operands take 128 KB of shared memory."""
    rows = tl.arange(0, 256)
    columns = tl.arange(0, 128)
    left = tl.load(output + rows[:, None] * 128 + columns[None, :])
    right = tl.load(output + columns[:, None] + rows[None, :] * num_heads)
    product = tl.dot(left, right)
    tl.store(partial_output + rows[:, None] * 256 + rows[None, :], product)


@triton.jit
def lacking_kernel(output, HEAD_DIM: tl.constexpr):
    """It does not take what it must."""
    tl.store(output, 1.0)
