"""Attention of several new tokens over the cache: grid (ceil(S / TILE_M), N, B).

Flash Attention forward: a program holds TILE_M queries of one head and walks over the slots that
they see in tiles of TILE_N. Tiles that all queries see whole are apart from those at the edges.
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
from kvconv.custom_ops.triton.scores import attend_tile, with_sink


@triton.constexpr_function
def without_mask(features: int) -> int:
    """Return the features of tiles that the mask does not touch."""
    return features & ~4


@triton.jit
def attend_slots(
    first, num_first, second, num_tiles, end, queries, own, heads, bias_rows, is_query,
    present_key, present_value, present_key_scale, present_value_scale, mask, attention_bias,
    alibi_slopes, bias_stride_slot, mask_width, window_size, capacity, scale, softcap,
    maximum, total, accumulator,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, FEATURES: tl.constexpr,
    CACHE_BITS: tl.constexpr, TILE_N: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Take `num_tiles` tiles of slots before `end` into the softmax.

    The first `num_first` begin at `first`, the others at `second`.
    """
    # Few tiles are edges: loads in flight there would only take registers from the others.
    for tile in tl.range(0, num_tiles, num_stages=1 if IS_EDGE else None):
        start = first + tile * TILE_N
        if IS_EDGE:
            start = tl.where(tile < num_first, start, second + (tile - num_first) * TILE_N)
        slots = start + tl.arange(0, TILE_N)
        rows = slots % capacity if has(FEATURES, "ring") else slots
        maximum, total, accumulator = attend_tile(
            queries, slots, rows, slots < end, own, heads, bias_rows, is_query,
            present_key, present_value, present_key_scale, present_value_scale, mask,
            attention_bias, alibi_slopes, bias_stride_slot, mask_width, window_size, scale, softcap,
            maximum, total, accumulator,
            HEAD_DIM, VALUE_HEAD_DIM, FEATURES, CACHE_BITS, TILE_N, IS_EDGE,
        )  # fmt: skip
    return maximum, total, accumulator


@triton.jit
def prefill_kernel(
    query, present_key, present_value, present_key_scale, present_value_scale, attention_mask, cos,
    sin, attention_bias, alibi_slopes, head_sink, past_sequence_length, output,
    query_token_stride, sequence_length, capacity, mask_width, num_heads, kv_num_heads,
    rotary_batch_stride, bias_stride_batch, bias_stride_head, bias_stride_query, bias_stride_slot,
    window_size, scale, softcap,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr, CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Attend from TILE_M tokens of one query head of one batch row."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    # The last tokens see most: they begin first.
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M
    i = first_token + tl.arange(0, TILE_M)
    is_query = i < sequence_length
    past = tl.load(past_sequence_length)
    end = past + sequence_length
    if not has(FEATURES, "ring"):
        end = tl.minimum(end, capacity)  # nobody on the host knows the length
    own = past + i
    heads = tl.full((TILE_M,), 0, tl.int32) + head

    angles = i * (ROTARY_DIM // 2)
    if ROTARY_DIM > 0:
        angles = batch * rotary_batch_stride + angles
    tokens = query + (batch * sequence_length + i) * query_token_stride + head * HEAD_DIM
    x = load_rotated(tokens, is_query, cos, sin, angles, HEAD_DIM, ROTARY_DIM, FEATURES)
    if CACHE_BITS != 0:
        x = hadamard(x, TILE_M, HEAD_DIM)
    queries = x.to(query.dtype.element_ty)

    cache = (batch * kv_num_heads + head // GROUP) * capacity
    present_key += cache * row_bytes(HEAD_DIM, CACHE_BITS, True)
    present_value += cache * row_bytes(VALUE_HEAD_DIM, CACHE_BITS, False)
    if CACHE_BITS != 0:
        present_key_scale += cache * num_groups(HEAD_DIM)
        present_value_scale += cache * num_groups(VALUE_HEAD_DIM)
    mask = attention_mask
    if attention_mask is not None:
        mask += batch * mask_width
    bias_rows = i.to(tl.int64)
    if has(FEATURES, "bias"):
        bias_rows = batch * bias_stride_batch + head.to(tl.int64) * bias_stride_head
        bias_rows += i.to(tl.int64) * bias_stride_query

    # Slots [first, last) are seen by a query, [whole, whole_end) by all.
    first = 0
    whole = 0
    last = end
    whole_end = end
    if has(FEATURES, "causal"):
        last = tl.minimum(end, past + first_token + TILE_M)
        whole_end = tl.minimum(end, past + first_token + 1)
    if has(FEATURES, "window"):
        first = tl.maximum(past + first_token - window_size + 1, 0) // TILE_N * TILE_N
        whole = tl.maximum(past + first_token + TILE_M - window_size, 0)
    if has(FEATURES, "mask"):
        # Padding is at the front: what lies behind the last hole needs no mask.
        whole_end = tl.minimum(whole_end, mask_width)
        hole = tl.full((), -1, tl.int32)
        for start in range(first, whole_end, 1024):
            slots = start + tl.arange(0, 1024)
            is_hole = tl.load(mask + slots, mask=slots < whole_end, other=1) == 0
            hole = tl.maximum(hole, tl.max(tl.where(is_hole, slots, -1), axis=0))
        whole = tl.maximum(whole, hole + 1)
    whole = (whole + TILE_N - 1) // TILE_N * TILE_N
    whole_end = tl.maximum(whole_end // TILE_N * TILE_N, first)
    whole = tl.minimum(tl.maximum(whole, first), whole_end)
    num_first = (whole - first) // TILE_N
    num_edges = num_first + tl.maximum(0, (last - whole_end + TILE_N - 1) // TILE_N)

    maximum = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    accumulator = tl.zeros((TILE_M, padded(VALUE_HEAD_DIM)), tl.float32)
    for part in tl.static_range(2):
        maximum, total, accumulator = attend_slots(
            whole if part == 0 else first, 0 if part == 0 else num_first, whole_end,
            (whole_end - whole) // TILE_N if part == 0 else num_edges, end,
            queries, own, heads, bias_rows, is_query,
            present_key, present_value, present_key_scale, present_value_scale, mask,
            attention_bias, alibi_slopes, bias_stride_slot, mask_width, window_size, capacity,
            scale, softcap, maximum, total, accumulator,
            HEAD_DIM, VALUE_HEAD_DIM, without_mask(FEATURES) if part == 0 else FEATURES,
            CACHE_BITS, TILE_N, part == 1,
        )  # fmt: skip
    if has(FEATURES, "sink"):
        sinks = tl.load(head_sink + heads)
        total, accumulator = with_sink(sinks, maximum, total, accumulator)
    # A row that saw nothing is 0.
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    if CACHE_BITS != 0:
        result = hadamard(result, TILE_M, VALUE_HEAD_DIM)
    h = tl.arange(0, padded(VALUE_HEAD_DIM))
    written = is_query[:, None] & (h < VALUE_HEAD_DIM)[None, :]
    outputs = ((batch * sequence_length + i) * num_heads + head) * VALUE_HEAD_DIM
    pointers = output + outputs[:, None] + h[None, :]
    tl.store(pointers, result.to(output.dtype.element_ty), mask=written)
