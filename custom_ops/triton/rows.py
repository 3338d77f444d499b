"""What the kernels share: rotary embedding, the Hadamard rotation, and rows of a cache."""

import triton
import triton.language as tl

FEATURES = {
    "rotary": 1,
    "rotary_interleaved": 2,
    "mask": 4,
    "bias": 8,
    "alibi": 16,
    "sink": 32,
    "softcap": 64,
    "window": 128,
    "ring": 256,
    "causal": 512,
}
"""Bits of the constexpr FEATURES, as packs name them."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def padded(width):
    """Return the power of two in which a row is computed: whole groups, and enough for a dot."""
    return max(triton.next_power_of_2(width), 32)


@triton.constexpr_function
def has(features, name):
    """Whether a variant has a feature."""
    return features & FEATURES[name] != 0


@triton.constexpr_function
def padded_groups(width):
    """Return the groups of 32 of a padded row."""
    return padded(width) // 32


@triton.constexpr_function
def num_groups(width):
    """Return the scales of a quantised row."""
    return (width + 31) // 32


@triton.constexpr_function
def rotation_size(width):
    """Return the largest power of two that divides a width: what the Hadamard rotation mixes."""
    return width & -width


@triton.constexpr_function
def row_bytes(width, bits, is_key):
    """Return the bytes, or numbers where bits is 0 or 8, of a cache's row."""
    if bits == 4:
        return num_groups(width) * (20 if is_key else 16)
    return width


@triton.constexpr_function
def inverse_root(size):
    """Return 1 / sqrt(size)."""
    return size**-0.5


@triton.jit
def butterfly(x, ROWS: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr):
    """Replace numbers that lie STRIDE apart, in pairs, by their sum and their difference."""
    pairs = tl.reshape(x, (ROWS, PADDED // (2 * STRIDE), 2, STRIDE))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(pairs, (ROWS, PADDED))


@triton.jit
def hadamard(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate float32 rows [ROWS, padded(WIDTH)], zeros behind WIDTH, in its power of two."""
    SIZE: tl.constexpr = rotation_size(WIDTH)
    for step in tl.static_range(10):  # no head is wider than 1024
        if (1 << step) < SIZE:
            x = butterfly(x, ROWS, padded(WIDTH), 1 << step)
    return x * inverse_root(SIZE)


@triton.jit
def load_rotated(
    heads, is_row, cos, sin, angles,
    WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Load rows of WIDTH numbers and apply the rotary embedding.

    Args:
        heads: [rows] pointers to their first numbers.
        is_row: [rows], which of them there are; the others are 0.
        cos: Table of float32, ROTARY_DIM / 2 numbers a token.
        sin: The same.
        angles: [rows] where a row's token begins in the tables.

    Returns:
        float32 [rows, padded(WIDTH)], zeros behind WIDTH.
    """
    h = tl.arange(0, padded(WIDTH))
    mask = is_row[:, None] & (h < WIDTH)[None, :]
    x = tl.load(heads[:, None] + h[None, :], mask=mask, other=0.0).to(tl.float32)
    if has(FEATURES, "rotary"):
        HALF: tl.constexpr = ROTARY_DIM // 2
        if has(FEATURES, "rotary_interleaved"):
            partner = h ^ 1
            is_first = h % 2 == 0
            angle = h // 2
        else:
            is_first = h < HALF
            partner = tl.where(is_first, h + HALF, h - HALF)
            angle = tl.where(is_first, h, h - HALF)
        turned = is_row[:, None] & (h < ROTARY_DIM)[None, :]
        other = tl.load(heads[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        c = tl.load(cos + angles[:, None] + angle[None, :], mask=turned, other=1.0)
        s = tl.load(sin + angles[:, None] + angle[None, :], mask=turned, other=0.0)
        x = x * c + tl.where(is_first[None, :], -other, other) * s
    return x


@triton.jit
def rounded_to_bfloat16(x):
    """Round finite float32 numbers to the nearest bfloat16, ties to even; as float32."""
    # Triton's interpreter casts by cutting off; of what is rounded already there is nothing to cut.
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_row(
    x, present, scales, rows, is_row,
    TILE: tl.constexpr, WIDTH: tl.constexpr, CACHE_BITS: tl.constexpr, IS_KEY: tl.constexpr,
):  # fmt: skip
    """Write float32 rows [TILE, padded(WIDTH)] into rows of a cache, rounded if need be.

    Args:
        x: The rows, zeros behind WIDTH.
        present: Pointer to the cache [.., row].
        scales: Pointer to its bfloat16 scales; unused where CACHE_BITS is 0.
        rows: int64 [TILE] indices of rows.
        is_row: [TILE], which of them are written.
    """
    PADDED: tl.constexpr = padded(WIDTH)
    ROW: tl.constexpr = row_bytes(WIDTH, CACHE_BITS, IS_KEY)
    if CACHE_BITS == 0:
        h = tl.arange(0, PADDED)
        mask = is_row[:, None] & (h < WIDTH)[None, :]
        x = x.to(present.dtype.element_ty)
        tl.store(present + rows[:, None] * ROW + h[None, :], x, mask=mask)
    else:
        GROUPS: tl.constexpr = num_groups(WIDTH)
        PADDED_GROUPS: tl.constexpr = padded_groups(WIDTH)
        ZERO: tl.constexpr = 0 if CACHE_BITS == 8 else 16 if IS_KEY else 8
        groups = tl.reshape(hadamard(x, TILE, WIDTH), (TILE, PADDED_GROUPS, 32))
        # A group with a number that is not finite reads back as NaN: x - x is not 0 there.
        is_finite = tl.sum(tl.where(groups - groups == 0, 0, 1), axis=2) == 0
        groups = tl.where(is_finite[:, :, None], groups, 0.0)
        most = tl.max(groups, axis=2)
        least = tl.min(groups, axis=2)
        largest = tl.where(most > -least, most, least)
        if CACHE_BITS == 8:
            scale = tl.div_rn(tl.abs(largest), 127.0)
        else:
            scale = largest / -ZERO
        scale = rounded_to_bfloat16(scale)
        is_zero = tl.abs(scale) < 1.1754943508222875e-38
        inverse = tl.where(is_zero, 0.0, tl.div_rn(1.0, tl.where(is_zero, 1.0, scale)))
        g = tl.arange(0, PADDED_GROUPS)
        is_group = is_row[:, None] & (g < GROUPS)[None, :]
        written = tl.where(is_zero, 0.0, scale)
        written = tl.where(is_finite, written, float("nan")).to(tl.bfloat16)
        tl.store(scales + rows[:, None] * GROUPS + g[None, :], written, mask=is_group)

        # Rounds halves up, where the CPU rounds them to even: as good, and exact in float32.
        codes = tl.floor(groups * inverse[:, :, None] + 0.5)
        if CACHE_BITS == 8:
            h = tl.arange(0, PADDED)
            mask = is_row[:, None] & (h < WIDTH)[None, :]
            codes = tl.reshape(tl.minimum(tl.maximum(codes, -127.0), 127.0), (TILE, PADDED))
            tl.store(present + rows[:, None] * ROW + h[None, :], codes.to(tl.int8), mask=mask)
        else:
            codes = (tl.minimum(codes, ZERO - 1.0) + ZERO).to(tl.int32)
            halves = tl.reshape(codes & 15, (TILE, PADDED_GROUPS, 2, 16))
            low, high = tl.split(tl.permute(halves, (0, 1, 3, 2)))
            j = tl.arange(0, 16)
            bytes_ = rows[:, None, None] * ROW + g[None, :, None] * 16 + j[None, None, :]
            mask = tl.broadcast_to(is_group[:, :, None], (TILE, PADDED_GROUPS, 16))
            tl.store(present + bytes_, (low + high * 16).to(tl.uint8), mask=mask)
            if IS_KEY:
                bits = tl.reshape(codes >> 4, (TILE, PADDED_GROUPS, 4, 8))
                powers = 1 << tl.arange(0, 8)
                fifths = tl.sum(bits * powers[None, None, None, :], axis=3)
                byte = tl.arange(0, 4)
                first: tl.constexpr = GROUPS * 16
                bytes_ = rows[:, None, None] * ROW + first + g[None, :, None] * 4
                mask = tl.broadcast_to(is_group[:, :, None], (TILE, PADDED_GROUPS, 4))
                tl.store(present + bytes_ + byte[None, None, :], fifths.to(tl.uint8), mask=mask)


@triton.jit
def int8_to_float16(codes):
    """Convert whole numbers of a byte; 4 instructions for 2 of them, where a cast takes 8."""
    # 0x6400 is 1024 in float16, whose last bit is worth 1.
    bits = (codes.to(tl.int16) & 0xFF) ^ 0x6480
    return bits.to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def load_rows(
    present, rows, is_row,
    TILE: tl.constexpr, WIDTH: tl.constexpr, CACHE_BITS: tl.constexpr, IS_KEY: tl.constexpr,
    IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Load rows of a cache, floats as they are and codes as float16: [TILE, padded(WIDTH)].

    What is behind WIDTH is 0, but for codes of 4 bits: their scales are.

    Args:
        present: Pointer to the cache's rows of this batch row and head.
        rows: int32 [TILE] indices of rows.
        is_row: [TILE], which of them are read where IS_EDGE; the others are 0.
    """
    PADDED: tl.constexpr = padded(WIDTH)
    ROW: tl.constexpr = row_bytes(WIDTH, CACHE_BITS, IS_KEY)
    first = rows.to(tl.int64) * ROW
    if CACHE_BITS == 0 or CACHE_BITS == 8:
        h = tl.arange(0, PADDED)
        pointers = present + first[:, None] + h[None, :]
        if IS_EDGE:
            x = tl.load(pointers, mask=is_row[:, None] & (h < WIDTH)[None, :], other=0)
        elif PADDED != WIDTH:
            x = tl.load(
                pointers, mask=tl.broadcast_to((h < WIDTH)[None, :], (TILE, PADDED)), other=0
            )
        else:
            x = tl.load(pointers)
        # One return for all: with several, Triton compares their types, compiled or not.
        numbers = x if CACHE_BITS == 0 else int8_to_float16(x)
    else:
        GROUPS: tl.constexpr = num_groups(WIDTH)
        PADDED_GROUPS: tl.constexpr = padded_groups(WIDTH)
        b = tl.arange(0, PADDED // 2)
        is_byte = tl.broadcast_to((b < GROUPS * 16)[None, :], (TILE, PADDED // 2))
        if IS_EDGE:
            is_byte = is_byte & is_row[:, None]
        both = tl.load(present + first[:, None] + b[None, :], mask=is_byte, other=0).to(tl.int16)
        both = tl.reshape(both, (TILE, PADDED_GROUPS, 16))
        codes = tl.join(both & 15, both >> 4)  # [TILE, groups, 16, 2]
        codes = tl.reshape(tl.permute(codes, (0, 1, 3, 2)), (TILE, PADDED_GROUPS, 32))
        if IS_KEY:
            h = tl.arange(0, 32)
            g = tl.arange(0, PADDED_GROUPS)
            byte = GROUPS * 16 + g[:, None] * 4 + (h // 8)[None, :]
            is_byte = tl.broadcast_to((g < GROUPS)[None, :, None], (TILE, PADDED_GROUPS, 32))
            if IS_EDGE:
                is_byte = is_byte & is_row[:, None, None]
            fifths = tl.load(
                present + first[:, None, None] + byte[None, :, :], mask=is_byte, other=0
            ).to(tl.int16)
            codes += ((fifths >> (h % 8)[None, None, :].to(tl.int16)) & 1) * 16
            codes -= 16
        else:
            codes -= 8
        numbers = tl.reshape(codes, (TILE, PADDED)).to(tl.float16)
    return numbers


@triton.jit
def load_scales(
    scales, rows, is_row, TILE: tl.constexpr, WIDTH: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Load the scales of rows, each for its group's numbers: float32 [TILE, padded(WIDTH)]."""
    PADDED: tl.constexpr = padded(WIDTH)
    GROUPS: tl.constexpr = num_groups(WIDTH)
    PADDED_GROUPS: tl.constexpr = padded_groups(WIDTH)
    g = tl.arange(0, PADDED_GROUPS)
    mask = tl.broadcast_to((g < GROUPS)[None, :], (TILE, PADDED_GROUPS))
    if IS_EDGE:
        mask = mask & is_row[:, None]
    pointers = scales + rows.to(tl.int64)[:, None] * GROUPS + g[None, :]
    found = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    wide = tl.broadcast_to(found[:, :, None], (TILE, PADDED_GROUPS, 32))
    return tl.reshape(wide, (TILE, PADDED))


@triton.jit
def load_cache(
    present, scales, rows, is_row, DTYPE: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, CACHE_BITS: tl.constexpr, IS_KEY: tl.constexpr,
    IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Load rows of a cache as DTYPE [TILE, padded(WIDTH)], their scales applied."""
    x = load_rows(present, rows, is_row, TILE, WIDTH, CACHE_BITS, IS_KEY, IS_EDGE)
    if CACHE_BITS != 0:
        # In float32: a small scale has few bits left in float16.
        x = x.to(tl.float32) * load_scales(scales, rows, is_row, TILE, WIDTH, IS_EDGE)
    return x.to(DTYPE)


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def weigh(scores, seen, maximum, total, accumulator):
    """Take a tile of scores into the online softmax: exact, whatever order the tiles come in.

    Args:
        scores: float32 [rows, slots], in units of log2(e).
        seen: [rows, slots], or None where all are.
        maximum: [rows] so far; total: [rows]; accumulator: [rows, width].

    Returns:
        Weights [rows, slots], and the three, the sum of weighted values still to be added.
    """
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row that has seen nothing keeps -inf; 0 in its place keeps NaN out of the weights.
    shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(maximum - shift)
    return weights, new, total * alpha + tl.sum(weights, axis=1), accumulator * alpha[:, None]
