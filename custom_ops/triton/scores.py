"""Scores of queries and keys, and which of them count."""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.rows import (
    LOG2_E,
    has,
    load_cache,
    tanh,
    weigh,
)


@triton.jit
def attend_tile(
    queries, slots, rows, is_slot, own, heads, bias_rows, is_query,
    present_key, present_value, present_key_scale, present_value_scale, mask, attention_bias,
    alibi_slopes, bias_stride_slot, mask_width, window_size, scale, softcap,
    maximum, total, accumulator,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, FEATURES: tl.constexpr,
    CACHE_BITS: tl.constexpr, TILE_N: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Take a tile of TILE_N slots into the online softmax of all rows of queries.

    Args:
        queries: [M, padded(HEAD_DIM)], rotated as the keys are, in the type of the products.
        slots: int32 [TILE_N]; rows: where they lie; is_slot: which there are.
        own: int32 [M], the slots of the queries.
        heads: int32 [M], their heads.
        bias_rows: int64 [M], where a query's row of attention_bias begins.
        is_query: [M], which queries there are.
        present_key: Pointer to the rows of this head, as are the next three.
        mask: Pointer to this batch row's attention mask.
        maximum: See `weigh`; so are total and accumulator, which are returned.
        IS_EDGE: Whether some slots are not there, or not seen by some queries.
    """
    DTYPE: tl.constexpr = queries.dtype
    # The bias may be no wider than the mask, and the cache's length is the device's word alone.
    inside = is_slot
    is_row = is_slot
    if has(FEATURES, "mask"):
        inside = is_slot & (slots < mask_width)
        is_row = tl.load(mask + slots, mask=inside, other=0) != 0
    # What no query sees is not read: it may be anything.
    READS_PART: tl.constexpr = IS_EDGE or has(FEATURES, "mask")
    keys = load_cache(
        present_key, present_key_scale, rows, is_slot, DTYPE, TILE_N, HEAD_DIM, CACHE_BITS, True,
        IS_EDGE,
    )  # fmt: skip
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    if has(FEATURES, "softcap"):
        scores = softcap * tanh(scores * (scale / softcap))
    else:
        scores = scores * scale
    if has(FEATURES, "alibi"):
        slopes = tl.load(alibi_slopes + heads, mask=is_query, other=0.0)
        scores += slopes[:, None] * (slots[None, :] - own[:, None]).to(tl.float32)
    if has(FEATURES, "bias"):
        pointers = attention_bias + bias_rows[:, None] + slots[None, :] * bias_stride_slot
        is_bias = is_query[:, None] & inside[None, :]
        scores += tl.load(pointers, mask=is_bias, other=0.0).to(tl.float32)
    scores = scores * LOG2_E
    if READS_PART:
        seen = tl.broadcast_to(is_row[None, :], scores.shape)
        if IS_EDGE:
            if has(FEATURES, "causal"):
                seen = seen & (slots[None, :] <= own[:, None])
            if has(FEATURES, "window"):
                seen = seen & (slots[None, :] > own[:, None] - window_size)
        weights, maximum, total, accumulator = weigh(scores, seen, maximum, total, accumulator)
    else:
        weights, maximum, total, accumulator = weigh(scores, None, maximum, total, accumulator)
    values = load_cache(
        present_value, present_value_scale, rows, is_row, DTYPE, TILE_N, VALUE_HEAD_DIM, CACHE_BITS,
        False, READS_PART,
    )  # fmt: skip
    accumulator = tl.dot(weights.to(DTYPE), values, accumulator, input_precision="tf32x3")
    return maximum, total, accumulator


@triton.jit
def with_sink(sinks, maximum, total, accumulator):
    """Add one more logit to the softmax of each row; sinks [rows] in natural units."""
    sinks = sinks * LOG2_E
    larger = tl.maximum(maximum, sinks)
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    alpha = tl.exp2(maximum - shift)
    return total * alpha + tl.exp2(sinks - shift), accumulator * alpha[:, None]
