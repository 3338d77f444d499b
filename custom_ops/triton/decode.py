"""Attention of one new token over a part of the cache. Grid: num_splits, K, B."""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.codes import key_bits, num_groups, row_elements
from kvconv.custom_ops.triton.rows import (
    ALIBI,
    BIAS,
    LN_2,
    MASK,
    RING,
    WINDOW,
    dot_type,
    has,
    load_rotated,
    padded,
    transform,
)
from kvconv.custom_ops.triton.softmax import attend


@triton.jit
def decode_kernel(
    query,
    present_key,
    present_value,
    present_key_scale,
    present_value_scale,
    attention_mask,
    cos,
    sin,
    attention_bias,
    alibi_slopes,
    past_sequence_length,
    partial_output,
    partial_maximum,
    partial_sum,
    query_token_stride,
    sequence_length,
    capacity,
    mask_width,
    num_heads,
    kv_num_heads,
    rotary_batch_stride,
    bias_stride_batch,
    bias_stride_head,
    bias_stride_query,
    bias_stride_slot,
    window_size,
    num_splits,
    slots_per_split,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Attend with all query heads of a key head, so that each key and value is read once.

    A split is slots_per_split rows of the cache. One that has nothing to see leaves a maximum of
    -inf, and zeros.
    """
    split, kv_head = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    member = tl.arange(0, TILE_M)[:, None]
    is_query = member < GROUP
    head = kv_head * GROUP + member
    past = tl.load(past_sequence_length)

    table_rows = 0
    if ROTARY_DIM > 0:
        table_rows = batch * rotary_batch_stride
    queries = load_rotated(
        query + batch * query_token_stride + head * HEAD_DIM,
        is_query,
        cos,
        sin,
        table_rows,
        HEAD_DIM,
        ROTARY_DIM,
        FEATURES,
    )
    if CACHE_BITS != 0:
        queries = transform(queries, HEAD_DIM)
    queries = queries.to(dot_type(query.dtype.element_ty, present_key.dtype.element_ty, CACHE_BITS))

    # Positions are those of the key head's cache from here on.
    kv_row = (batch * kv_num_heads + kv_head) * capacity
    present_key += kv_row * row_elements(HEAD_DIM, key_bits(CACHE_BITS))
    present_value += kv_row * row_elements(VALUE_HEAD_DIM, CACHE_BITS)
    if CACHE_BITS != 0:
        present_key_scale += kv_row * num_groups(HEAD_DIM)
        present_value_scale += kv_row * num_groups(VALUE_HEAD_DIM)
    if has(FEATURES, MASK):
        attention_mask += batch * mask_width
    bias_row = 0
    if has(FEATURES, BIAS):
        bias_row = batch * bias_stride_batch + head.to(tl.int64) * bias_stride_head
    slope = 0.0
    if has(FEATURES, ALIBI):
        slope = tl.load(alibi_slopes + head, mask=is_query, other=0.0)

    # The walk: [first, full_end) without a check, [full_end, end). A window has edges anywhere.
    first = split * slots_per_split
    end = tl.minimum(first + slots_per_split, tl.minimum(past + 1, capacity))
    full_end = tl.maximum(first, end // TILE_N * TILE_N)
    if has(FEATURES, WINDOW):
        if not has(FEATURES, RING):
            first = tl.maximum(first, tl.maximum(0, past + 1 - window_size) // TILE_N * TILE_N)
        full_end = first
    maximum = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    weighted = tl.zeros([TILE_M, padded(VALUE_HEAD_DIM)], tl.float32)
    for part in tl.static_range(2):
        if part == 1 or not has(FEATURES, WINDOW):
            maximum, total, weighted = attend(
                maximum,
                total,
                weighted,
                queries,
                first if part == 0 else full_end,
                full_end if part == 0 else end,
                end,
                past,
                past,
                is_query,
                present_key,
                present_value,
                present_key_scale,
                present_value_scale,
                attention_mask,
                mask_width,
                attention_bias,
                bias_row,
                bias_stride_slot,
                slope,
                capacity,
                window_size,
                scale,
                softcap,
                HEAD_DIM,
                VALUE_HEAD_DIM,
                FEATURES,
                CACHE_BITS,
                TILE_N,
                True,
                part == 1,
            )

    partial = (split * tl.num_programs(2) + batch) * num_heads + head
    rows = tl.arange(0, TILE_M)
    row_partial = (split * tl.num_programs(2) + batch) * num_heads + kv_head * GROUP + rows
    tl.store(partial_maximum + row_partial, maximum * LN_2, mask=rows < GROUP)
    tl.store(partial_sum + row_partial, total, mask=rows < GROUP)
    columns = tl.arange(0, padded(VALUE_HEAD_DIM))[None, :]
    tl.store(
        partial_output + partial * VALUE_HEAD_DIM + columns,
        weighted,
        mask=is_query & (columns < VALUE_HEAD_DIM),
    )
