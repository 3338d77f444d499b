"""Attention of a tile of query rows over the cache, as prefill and decode both do it.

A tile's rows are the tokens of one head (prefill) or the heads of one token (decode). Scores are in
base 2, and sums run online: `maximum` and `total` [rows], `weighted` [rows, padded width], float32.
float32 products take three passes of TF32 ("tf32x3"), which is near float32's own accuracy.
"""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.codes import key_bits, load_cache
from kvconv.custom_ops.triton.rows import (
    ALIBI,
    BIAS,
    CAUSAL,
    LOG2_E,
    MASK,
    RING,
    SOFTCAP,
    WINDOW,
    has,
)


@triton.jit
def slots_of(index, last_slot, capacity, BY_ROW: tl.constexpr, FEATURES: tl.constexpr):
    """Return cache rows and slots of positions of the walk, which goes by either.

    By row, a ring's row has the newest slot that lies there; rows that have none yet get a slot
    beyond `last_slot`.
    """
    row, slot = index, index
    if has(FEATURES, RING):
        if BY_ROW:
            slot = row + tl.maximum(0, last_slot - row) // capacity * capacity
        else:
            row = slot % capacity
    return row.to(tl.int64), slot


@triton.jit
def masked_scores(
    scores,
    slot,
    is_seen,
    own_slot,
    is_query,
    attention_bias,
    bias_row,
    bias_stride_slot,
    slope,
    window_size,
    scale,
    softcap,
    EDGES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Turn products [rows, slots] into scores in base 2, -inf where a query must not look."""
    if has(FEATURES, SOFTCAP):
        # tanh, which cannot overflow: exp2 goes to infinity and the quotient to 0.
        turns = tl.exp2(scores * (scale * (2.0 * LOG2_E) / softcap))
        scores = (softcap * LOG2_E) * (1.0 - 2.0 / (turns + 1.0))
    else:
        scores *= scale * LOG2_E
    if has(FEATURES, ALIBI):
        scores += slope * (slot - own_slot).to(tl.float32) * LOG2_E
    if has(FEATURES, BIAS):
        bias = attention_bias + bias_row + slot.to(tl.int64) * bias_stride_slot
        scores += tl.load(bias, mask=is_query & is_seen, other=0.0).to(tl.float32) * LOG2_E
    if EDGES:
        if has(FEATURES, CAUSAL):
            is_seen = is_seen & (slot <= own_slot)
        if has(FEATURES, WINDOW):
            is_seen = is_seen & (slot > own_slot - window_size)
    if EDGES or has(FEATURES, MASK):
        scores = tl.where(is_seen, scores, float("-inf"))
    return scores


@triton.jit
def attend(
    maximum,
    total,
    weighted,
    query,
    first,
    last,
    end,
    last_slot,
    own_slot,
    is_query,
    present_key,
    present_value,
    present_key_scale,
    present_value_scale,
    mask_row,
    mask_width,
    attention_bias,
    bias_row,
    bias_stride_slot,
    slope,
    capacity,
    window_size,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    CACHE_BITS: tl.constexpr,
    TILE_N: tl.constexpr,
    BY_ROW: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Attend over the tiles of [first, last); without EDGES no query's range ends inside them.

    Args:
        query: [rows, padded(HEAD_DIM)] in the type of products.
        first: Multiple of TILE_N.
        end: What the walk must not read at or beyond; looked at with EDGES only.
        last_slot: The newest slot of the cache.
        own_slot: [rows, 1] or a number, the slot of a row's query.
        is_query: [rows, 1].
        present_key: The head's first element, as are the other three of the cache.
        mask_row: The batch row's part of attention_mask.
        bias_row: int64 [rows, 1], where a row begins in attention_bias.
        slope: [rows, 1] or a number.
    """
    for start in tl.range(first, last, TILE_N):
        index = start + tl.arange(0, TILE_N)
        row, slot = slots_of(index, last_slot, capacity, BY_ROW, FEATURES)
        is_row = index < end
        is_seen = is_row
        if BY_ROW and has(FEATURES, RING):
            is_seen = is_seen & (slot <= last_slot)
        if has(FEATURES, MASK):
            is_inside = is_seen & (slot < mask_width)
            is_seen = is_inside & (tl.load(mask_row + slot, mask=is_inside, other=0) != 0)
        keys = load_cache(
            present_key,
            present_key_scale,
            row[:, None],
            is_row[:, None],
            HEAD_DIM,
            key_bits(CACHE_BITS),
            EDGES,
        ).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
        scores = masked_scores(
            scores,
            slot[None, :],
            is_seen[None, :],
            own_slot,
            is_query,
            attention_bias,
            bias_row,
            bias_stride_slot,
            slope,
            window_size,
            scale,
            softcap,
            EDGES,
            FEATURES,
        )
        larger = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen nothing yet subtracts 0 from -inf, not -inf.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        factor = tl.exp2(maximum - base)
        total = total * factor + tl.sum(weights, axis=1)
        # Values that the mask hides are not loaded: 0 times what lies there could be NaN.
        values = load_cache(
            present_value,
            present_value_scale,
            row[:, None],
            is_seen[:, None],
            VALUE_HEAD_DIM,
            CACHE_BITS,
            EDGES or has(FEATURES, MASK),
        ).to(query.dtype)
        weighted = tl.dot(
            weights.to(query.dtype),
            values,
            weighted * factor[:, None],
            input_precision="tf32x3",
        )
        maximum = larger
    return maximum, total, weighted


@triton.jit
def divided(maximum, total, weighted, sink, HAS_SINK: tl.constexpr):
    """Divide by the sum, a sink's weight in it; rows that see nothing are 0.

    `maximum` and `sink` [rows] are in base 2.
    """
    if HAS_SINK:
        larger = tl.maximum(maximum, sink)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        factor = tl.exp2(maximum - base)
        total = total * factor + tl.exp2(sink - base)
        weighted *= factor[:, None]
    return weighted / tl.where(total == 0.0, 1.0, total)[:, None]
