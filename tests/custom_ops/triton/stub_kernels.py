"""Small kernels with the parameters of the real ones, to test how they are compiled."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    query, unused, output, query_token_stride, sequence_length, scale,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr, CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.arange(0, HEAD_DIM)
    offsets = rows[:, None] * query_token_stride + columns[None, :]
    inside = (rows < sequence_length)[:, None]
    tl.store(output + offsets, tl.load(query + offsets, inside) * scale, inside)


@triton.jit
def dot_kernel(
    query, unused, output, query_token_stride, sequence_length, scale,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr, CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, 256)
    columns = tl.arange(0, HEAD_DIM)
    tile = tl.load(query + rows[:, None] * query_token_stride + columns[None, :])
    total = tl.dot(tile, tl.trans(tile))
    for _ in range(sequence_length):
        total = tl.dot(total.to(tile.dtype), total.to(tile.dtype)) * scale
    tl.store(output + rows[:, None] * query_token_stride + rows[None, :], total)
