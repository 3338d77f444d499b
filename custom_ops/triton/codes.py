"""The codes of quantised caches; custom_ops/include/kvconv/cache_format.h is their format.

BITS is 0 (a float cache), 8, 4 (values of int4 caches) or 5 (their keys).
"""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.rows import padded

# Adding it to a float32 leaves the nearest integer, ties to even; its bits plus a small integer
# are the float of the sum. A conversion proper takes a quarter of the multiprocessor's lanes.
ROUNDING = tl.constexpr(12582912.0)
INTEGER_BITS = tl.constexpr(0x4B000000)
INTEGER_FLOAT = tl.constexpr(8388608.0)


@triton.constexpr_function
def num_groups(width: int) -> int:
    """Return the groups of 32 in a row."""
    return (width + 31) // 32


@triton.constexpr_function
def key_bits(cache_bits: int) -> int:
    """Return BITS of a cache's keys."""
    return 5 if cache_bits == 4 else cache_bits


@triton.constexpr_function
def row_elements(width: int, bits: int) -> int:
    """Return the elements of a row in the cache's tensor."""
    return {0: width, 8: width, 4: 16 * num_groups(width), 5: 20 * num_groups(width)}[bits]


@triton.constexpr_function
def zero_point(bits: int) -> int:
    """Return the code of 0."""
    return {8: 0, 4: 8, 5: 16}[bits]


@triton.jit
def small_float(codes, ZERO: tl.constexpr):
    """Convert uint32 below 2^22 to float32 and subtract ZERO."""
    return (codes | INTEGER_BITS).to(tl.float32, bitcast=True) - (INTEGER_FLOAT + ZERO)


@triton.jit
def load_cache(
    cache, scales, row, is_row, WIDTH: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr
):
    """Load [rows, padded(WIDTH)] of one head: floats as they are, codes as float32 numbers.

    Args:
        cache: The head's first element.
        scales: The head's first scale, where there are codes.
        row: int64 [rows, 1].
        is_row: bool [rows, 1]; other rows are 0. Not looked at unless MASKED.
    """
    columns = tl.arange(0, padded(WIDTH))[None, :]
    elements: tl.constexpr = row_elements(WIDTH, BITS)
    start = cache + row * elements
    inside = columns < WIDTH
    if MASKED:
        inside = inside & is_row
    if BITS == 0:
        if MASKED or WIDTH != padded(WIDTH):
            rows = tl.load(start + columns, mask=inside, other=0.0)
        else:
            rows = tl.load(start + columns)
    else:
        group = columns // 32
        if BITS == 8:
            codes = tl.load(start + columns, mask=inside, other=0).to(tl.uint8, bitcast=True)
            numbers = small_float(codes.to(tl.uint32) ^ 0x80, 128)
        else:
            both = tl.load(start + group * 16 + columns % 16, mask=inside, other=0).to(tl.uint32)
            codes = (both >> (columns // 16 % 2 * 4).to(tl.uint32)) & 15
            if BITS == 5:
                fifth = start + (16 * num_groups(WIDTH) + columns // 8)
                eight = tl.load(fifth, mask=inside, other=0).to(tl.uint32)
                codes = codes | ((eight >> (columns % 8).to(tl.uint32)) & 1) << 4
            numbers = small_float(codes, zero_point(BITS))
        scale = tl.load(scales + row * num_groups(WIDTH) + group, mask=inside, other=0.0)
        rows = numbers * scale.to(tl.float32)
    return rows


@triton.jit
def group_scales(groups, BITS: tl.constexpr):
    """Return the scales bfloat16 [rows, groups] of float32 [rows, groups, 32]."""
    magnitude = tl.abs(groups)
    # The first of the largest, with its sign; `where` and not `max` on values, for NaN.
    largest, place = tl.max(magnitude, axis=2, return_indices=True)
    if BITS != 8:
        is_largest = tl.arange(0, 32)[None, None, :] == place[:, :, None]
        largest = tl.sum(tl.where(is_largest, groups, 0.0), axis=2)
    divisor: tl.constexpr = 127.0 if BITS == 8 else -1.0 * zero_point(BITS)
    number = tl.div_rn(largest, tl.full(largest.shape, divisor, tl.float32))
    # To bfloat16 by hand, as bits: the nearest, ties to even.
    bits = number.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    size = bits & 0x7FFFFFFF
    bits = tl.where(size < 0x00800000, 0, bits)  # what would be subnormal
    finite = tl.min((magnitude < float("inf")).to(tl.int32), axis=2) != 0
    bits = tl.where(finite & (size < 0x7F800000), bits, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def group_codes(groups, scales, BITS: tl.constexpr):
    """Return the codes int32 [rows, groups, 32] under the scales."""
    zero: tl.constexpr = zero_point(BITS)
    lowest: tl.constexpr = -127.0 if BITS == 8 else -1.0 * zero
    highest: tl.constexpr = 127.0 if BITS == 8 else zero - 1.0
    has_codes = (scales != 0.0) & (scales == scales)
    divisor = tl.where(has_codes, scales, 1.0)
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    codes = tl.where(has_codes[:, :, None], groups, 0.0) * inverse[:, :, None]
    codes = (codes + ROUNDING) - ROUNDING
    return tl.minimum(tl.maximum(codes, lowest), highest).to(tl.int32) + zero


@triton.jit
def store_codes(cache, scales, row, is_row, rows, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Quantise rotated rows and write codes and scales; arguments as of `load_cache`."""
    num_rows: tl.constexpr = rows.shape[0]
    groups: tl.constexpr = padded(WIDTH) // 32
    used: tl.constexpr = num_groups(WIDTH)
    grouped = tl.reshape(rows, [num_rows, groups, 32])
    scale = group_scales(grouped, BITS)
    codes = group_codes(grouped, scale, BITS)
    start = cache + row * row_elements(WIDTH, BITS)
    group = tl.arange(0, groups)[None, :]
    tl.store(
        scales + row * used + group,
        scale.to(scales.dtype.element_ty),
        mask=is_row & (group < used),
    )
    if BITS == 8:
        columns = tl.arange(0, padded(WIDTH))[None, :]
        flat = tl.reshape(codes, [num_rows, padded(WIDTH)])
        tl.store(start + columns, flat.to(tl.int8), mask=is_row & (columns < WIDTH))
    else:
        halves = tl.permute(tl.reshape(codes & 15, [num_rows, groups, 2, 16]), (0, 1, 3, 2))
        low, high = tl.split(halves)
        both = tl.reshape(low | high << 4, [num_rows, groups * 16])
        columns = tl.arange(0, groups * 16)[None, :]
        tl.store(start + columns, both.to(tl.uint8), mask=is_row & (columns < used * 16))
    if BITS == 5:
        place = tl.arange(0, 8)[None, None, :]
        fifth = tl.reshape(codes >> 4, [num_rows, groups * 4, 8]) << place
        columns = tl.arange(0, groups * 4)[None, :]
        tl.store(
            start + used * 16 + columns,
            tl.sum(fifth, axis=2).to(tl.uint8),
            mask=is_row & (columns < used * 4),
        )
