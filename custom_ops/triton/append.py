"""The kernel that writes new keys and values into the cache. Grid: ceil(S / TILE_M), K, B."""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.codes import key_bits, num_groups, row_elements, store_codes
from kvconv.custom_ops.triton.rows import RING, has, load_rotated, load_rows, padded, transform


@triton.jit
def store_rows(
    cache,
    scales,
    head,
    capacity,
    row,
    is_row,
    rows,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
):
    """Write rows of a head, rotated and quantised where the cache is."""
    cache += head * capacity * row_elements(WIDTH, BITS)
    if BITS == 0:
        columns = tl.arange(0, padded(WIDTH))[None, :]
        tl.store(
            cache + row * WIDTH + columns,
            rows.to(cache.dtype.element_ty),
            mask=is_row & (columns < WIDTH),
        )
    else:
        scales += head * capacity * num_groups(WIDTH)
        store_codes(cache, scales, row, is_row, transform(rows, WIDTH), WIDTH, BITS)


@triton.jit
def append_kernel(
    key,
    value,
    present_key,
    present_value,
    present_key_scale,
    present_value_scale,
    cos,
    sin,
    past_sequence_length,
    key_token_stride,
    value_token_stride,
    sequence_length,
    capacity,
    kv_num_heads,
    rotary_batch_stride,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Store TILE_M new tokens of one key head.

    Nobody checks past_sequence_length before the launch: rows beyond the cache are dropped.
    """
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    new = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    is_new = new < sequence_length
    row = tl.load(past_sequence_length).to(tl.int64) + new
    if has(FEATURES, RING):
        row = row % capacity
    is_row = is_new & (row >= 0) & (row < capacity)
    token = batch * sequence_length + new
    head = batch * kv_num_heads + kv_head

    table_rows = 0
    if ROTARY_DIM > 0:
        table_rows = batch * rotary_batch_stride + new * (ROTARY_DIM // 2)
    keys = load_rotated(
        key + token * key_token_stride + kv_head * HEAD_DIM,
        is_new,
        cos,
        sin,
        table_rows,
        HEAD_DIM,
        ROTARY_DIM,
        FEATURES,
    )
    store_rows(
        present_key,
        present_key_scale,
        head,
        capacity,
        row,
        is_row,
        keys,
        HEAD_DIM,
        key_bits(CACHE_BITS),
    )
    values = load_rows(
        value + token * value_token_stride + kv_head * VALUE_HEAD_DIM, is_new, VALUE_HEAD_DIM
    )
    store_rows(
        present_value,
        present_value_scale,
        head,
        capacity,
        row,
        is_row,
        values,
        VALUE_HEAD_DIM,
        CACHE_BITS,
    )
