"""Attention of one new token over a split of the cache: grid (num_splits, K, B).

A program has all query heads of a key/value head, so that each key and value is read once.
`combine` adds the splits up.
"""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.rows import (
    hadamard,
    has,
    load_rotated,
    num_groups,
    padded,
    row_bytes,
)
from kvconv.custom_ops.triton.scores import attend_tile


@triton.jit
def decode_kernel(
    query, present_key, present_value, present_key_scale, present_value_scale, attention_mask, cos,
    sin, attention_bias, alibi_slopes, past_sequence_length, partial_output, partial_maximum,
    partial_sum, query_token_stride, capacity, mask_width, num_heads, kv_num_heads,
    rotary_batch_stride, bias_stride_batch, bias_stride_head, bias_stride_slot, window_size,
    num_splits, slots_per_split, scale, softcap,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr, CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Leave the partial softmax of rows [split * slots_per_split, ...) of the cache."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, TILE_M)
    is_query = r < GROUP
    heads = kv_head * GROUP + r
    past = tl.load(past_sequence_length)
    end = past + 1
    own = tl.full((TILE_M,), 0, tl.int32) + past

    angles = tl.zeros((TILE_M,), tl.int64)
    if ROTARY_DIM > 0:
        angles += batch * rotary_batch_stride
    tokens = query + batch * query_token_stride + heads * HEAD_DIM
    x = load_rotated(tokens, is_query, cos, sin, angles, HEAD_DIM, ROTARY_DIM, FEATURES)
    if CACHE_BITS != 0:
        x = hadamard(x, TILE_M, HEAD_DIM)
    queries = x.to(query.dtype.element_ty)

    cache = (batch * kv_num_heads + kv_head) * capacity
    present_key += cache * row_bytes(HEAD_DIM, CACHE_BITS, True)
    present_value += cache * row_bytes(VALUE_HEAD_DIM, CACHE_BITS, False)
    if CACHE_BITS != 0:
        present_key_scale += cache * num_groups(HEAD_DIM)
        present_value_scale += cache * num_groups(VALUE_HEAD_DIM)
    mask = attention_mask
    if attention_mask is not None:
        mask += batch * mask_width
    bias_rows = tl.zeros((TILE_M,), tl.int64)
    if has(FEATURES, "bias"):
        bias_rows = batch * bias_stride_batch + heads.to(tl.int64) * bias_stride_head

    first = split * slots_per_split
    last = tl.minimum(tl.minimum(first + slots_per_split, capacity), end)
    if has(FEATURES, "window"):
        if not has(FEATURES, "ring"):  # a ring's window may lie anywhere in it
            first = tl.maximum(first, tl.maximum(end - window_size, 0) // TILE_N * TILE_N)
    maximum = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    accumulator = tl.zeros((TILE_M, padded(VALUE_HEAD_DIM)), tl.float32)
    for start in range(first, last, TILE_N):
        rows = start + tl.arange(0, TILE_N)
        slots = rows
        if has(FEATURES, "ring"):  # the newest slot that lies there
            slots = rows + tl.maximum(end - 1 - rows, 0) // capacity * capacity
        maximum, total, accumulator = attend_tile(
            queries, slots, rows, rows < last, own, heads, bias_rows, is_query,
            present_key, present_value, present_key_scale, present_value_scale, mask,
            attention_bias, alibi_slopes, bias_stride_slot, mask_width, window_size, scale, softcap,
            maximum, total, accumulator,
            HEAD_DIM, VALUE_HEAD_DIM, FEATURES, CACHE_BITS, TILE_N, True,
        )  # fmt: skip

    h = tl.arange(0, padded(VALUE_HEAD_DIM))
    partials = (split * tl.num_programs(2) + batch) * num_heads + heads
    tl.store(partial_maximum + partials, maximum, mask=is_query)
    tl.store(partial_sum + partials, total, mask=is_query)
    written = is_query[:, None] & (h < VALUE_HEAD_DIM)[None, :]
    outputs = partial_output + partials[:, None] * VALUE_HEAD_DIM + h[None, :]
    tl.store(outputs, accumulator, mask=written)
