"""Rows of heads as the kernels hold them: widths, rotary embedding, the cache's rotation.

A tile of rows is [rows, padded(width)] float32 in registers, zero behind the row's own width.
"""

import triton
import triton.language as tl

# Bits of FEATURES.
ROTARY = tl.constexpr(1)
ROTARY_INTERLEAVED = tl.constexpr(2)
MASK = tl.constexpr(4)
BIAS = tl.constexpr(8)
ALIBI = tl.constexpr(16)
SINK = tl.constexpr(32)
SOFTCAP = tl.constexpr(64)
WINDOW = tl.constexpr(128)
RING = tl.constexpr(256)
CAUSAL = tl.constexpr(512)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def has(features: int, feature: int) -> bool:
    """Return whether a bit is set."""
    return features & feature != 0


@triton.constexpr_function
def padded(width: int) -> int:
    """Return the columns of a tile: a power of two, of at least one whole group of codes."""
    return max(32, 1 << (width - 1).bit_length())


@triton.constexpr_function
def rotation_stages(width: int) -> int:
    """Return log2 of the block that the cache's rotation mixes: see cache_format.h."""
    return (width & -width).bit_length() - 1


@triton.constexpr_function
def dot_type(activation: tl.dtype, cache: tl.dtype, cache_bits: int) -> tl.dtype:
    """Return what products are computed in: where floats differ, both become float32."""
    return activation if cache_bits != 0 or activation == cache else tl.float32


@triton.jit
def load_rows(pointers, is_row, WIDTH: tl.constexpr):
    """Load float32 [rows, padded(WIDTH)] from [rows, 1] pointers."""
    columns = tl.arange(0, padded(WIDTH))[None, :]
    return tl.load(pointers + columns, mask=is_row & (columns < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def load_rotated(
    pointers,
    is_row,
    cos,
    sin,
    table_rows,
    WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Load rows and turn their first ROTARY_DIM numbers; each element loads its partner too.

    `table_rows` is [rows, 1], the offset of each row in cos and sin.
    """
    rows = load_rows(pointers, is_row, WIDTH)
    if has(FEATURES, ROTARY):
        columns = tl.arange(0, padded(WIDTH))[None, :]
        if has(FEATURES, ROTARY_INTERLEAVED):
            partner = columns ^ 1
            angle = columns // 2
            is_first = columns % 2 == 0
        else:
            half: tl.constexpr = ROTARY_DIM // 2
            is_first = columns < half
            partner = tl.where(is_first, columns + half, columns - half)
            angle = tl.where(is_first, columns, columns - half)
        turns = is_row & (columns < ROTARY_DIM)
        others = tl.load(pointers + partner, mask=turns, other=0.0).to(tl.float32)
        c = tl.load(cos + table_rows + angle, mask=turns, other=1.0)
        s = tl.load(sin + table_rows + angle, mask=turns, other=0.0)
        rows = rows * c + tl.where(is_first, -others, others) * s
    return rows


@triton.jit
def transform(rows, WIDTH: tl.constexpr):
    """Rotate each row by the normalised Walsh-Hadamard transform of the cache's format.

    A stage adds and subtracts over the highest bit of the index in a block and moves that bit to
    the lowest place; after log2(block) stages each has been there and all are where they were.
    """
    num_rows: tl.constexpr = rows.shape[0]
    stages: tl.constexpr = rotation_stages(WIDTH)
    block: tl.constexpr = 1 << stages
    if stages > 0:
        num_blocks: tl.constexpr = num_rows * padded(WIDTH) // block
        x = tl.reshape(rows, [num_blocks, block])
        for _ in tl.static_range(stages):
            pairs = tl.permute(tl.reshape(x, [num_blocks, 2, block // 2]), (0, 2, 1))
            first, second = tl.split(pairs)
            x = tl.reshape(tl.join(first + second, first - second), [num_blocks, block])
        rows = tl.reshape(x, [num_rows, padded(WIDTH)]) * (block**-0.5)
    return rows
