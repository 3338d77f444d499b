"""Adds the splits of a decode step up: grid (N, B)."""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.rows import hadamard, has, padded
from kvconv.custom_ops.triton.scores import with_sink


@triton.jit
def combine_kernel(
    head_sink, output, partial_output, partial_maximum, partial_sum, num_heads, num_splits,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr, CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Finish one query head of one batch row; TILE_N splits at once."""
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    h = tl.arange(0, padded(VALUE_HEAD_DIM))
    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    accumulator = tl.zeros((1, padded(VALUE_HEAD_DIM)), tl.float32)
    for start in range(0, num_splits, TILE_N):
        splits = start + tl.arange(0, TILE_N)
        is_split = splits < num_splits
        partials = (splits * tl.num_programs(1) + batch) * num_heads + head
        maxima = tl.load(partial_maximum + partials, mask=is_split, other=float("-inf"))
        sums = tl.load(partial_sum + partials, mask=is_split, other=0.0)
        mask = is_split[:, None] & (h < VALUE_HEAD_DIM)[None, :]
        pointers = partial_output + partials[:, None] * VALUE_HEAD_DIM + h[None, :]
        outputs = tl.load(pointers, mask=mask, other=0.0)
        new = tl.maximum(maximum, tl.max(maxima, axis=0, keep_dims=True))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(maxima - shift)
        alpha = tl.exp2(maximum - shift)
        total = total * alpha + tl.sum(sums * weights, axis=0, keep_dims=True)
        added = tl.sum(outputs * weights[:, None], axis=0, keep_dims=True)
        accumulator = accumulator * alpha[:, None] + added
        maximum = new
    if has(FEATURES, "sink"):
        sinks = tl.zeros((1,), tl.float32) + tl.load(head_sink + head)
        total, accumulator = with_sink(sinks, maximum, total, accumulator)
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    if CACHE_BITS != 0:
        result = hadamard(result, 1, VALUE_HEAD_DIM)
    pointers = output + (batch * num_heads + head) * VALUE_HEAD_DIM + h[None, :]
    written = (h < VALUE_HEAD_DIM)[None, :]
    tl.store(pointers, result.to(output.dtype.element_ty), mask=written)
