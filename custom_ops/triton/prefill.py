"""Flash attention of several new tokens. Grid: ceil(S / TILE_M), N, B."""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.codes import key_bits, num_groups, row_elements
from kvconv.custom_ops.triton.rows import (
    ALIBI,
    BIAS,
    CAUSAL,
    LOG2_E,
    MASK,
    RING,
    SINK,
    WINDOW,
    dot_type,
    has,
    load_rotated,
    padded,
    transform,
)
from kvconv.custom_ops.triton.softmax import attend, divided


@triton.jit
def prefill_kernel(
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
    head_sink,
    past_sequence_length,
    output,
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
    """Attend with TILE_M queries of one head over a cache that holds the new tokens already."""
    # The last tiles see most and start first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    new = start + tl.arange(0, TILE_M)[:, None]
    is_query = new < sequence_length
    token = batch * sequence_length + new
    past = tl.load(past_sequence_length)

    table_rows = 0
    if ROTARY_DIM > 0:
        table_rows = batch * rotary_batch_stride + new * (ROTARY_DIM // 2)
    queries = load_rotated(
        query + token * query_token_stride + head * HEAD_DIM,
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
    kv_row = (batch * kv_num_heads + head // GROUP) * capacity
    present_key += kv_row * row_elements(HEAD_DIM, key_bits(CACHE_BITS))
    present_value += kv_row * row_elements(VALUE_HEAD_DIM, CACHE_BITS)
    if CACHE_BITS != 0:
        present_key_scale += kv_row * num_groups(HEAD_DIM)
        present_value_scale += kv_row * num_groups(VALUE_HEAD_DIM)
    if has(FEATURES, MASK):
        attention_mask += batch * mask_width
    bias_row = 0
    if has(FEATURES, BIAS):
        bias_row = (
            batch * bias_stride_batch
            + head.to(tl.int64) * bias_stride_head
            + new.to(tl.int64) * bias_stride_query
        )
    slope = 0.0
    if has(FEATURES, ALIBI):
        slope = tl.load(alibi_slopes + head)

    # The walk: [low, full) where a window begins, [full, full_end) without a check, [.., end).
    end = past + sequence_length
    if not has(FEATURES, RING):
        end = tl.minimum(end, capacity)  # nobody checks past_sequence_length before the launch
    full_end = end // TILE_N * TILE_N
    if has(FEATURES, CAUSAL):
        full_end = tl.minimum(full_end, (past + start + 1) // TILE_N * TILE_N)
        end = tl.minimum(end, past + start + TILE_M)
    low = 0
    full = 0
    if has(FEATURES, WINDOW):
        first_seen = past + start - window_size + 1
        low = tl.maximum(0, first_seen) // TILE_N * TILE_N
        full = tl.cdiv(tl.maximum(0, first_seen + TILE_M - 1), TILE_N) * TILE_N
        full_end = tl.maximum(full, full_end)

    maximum = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    weighted = tl.zeros([TILE_M, padded(VALUE_HEAD_DIM)], tl.float32)
    for part in tl.static_range(3):
        if part != 0 or has(FEATURES, WINDOW):
            first = low if part == 0 else full if part == 1 else full_end
            last = tl.minimum(full, end) if part == 0 else full_end if part == 1 else end
            maximum, total, weighted = attend(
                maximum,
                total,
                weighted,
                queries,
                first,
                last,
                end,
                past + sequence_length - 1,
                past + new,
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
                False,
                part != 1,
            )

    sink = 0.0
    if has(FEATURES, SINK):
        sink = tl.load(head_sink + head) * LOG2_E
    result = divided(maximum, total, weighted, sink, has(FEATURES, SINK))
    if CACHE_BITS != 0:
        result = transform(result, VALUE_HEAD_DIM)
    columns = tl.arange(0, padded(VALUE_HEAD_DIM))[None, :]
    tl.store(
        output + (token * num_heads + head) * VALUE_HEAD_DIM + columns,
        result.to(output.dtype.element_ty),
        mask=is_query & (columns < VALUE_HEAD_DIM),
    )
