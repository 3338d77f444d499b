"""The kernel that adds up what decode's splits leave. Grid: N, B."""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.rows import LOG2_E, SINK, has, padded, transform
from kvconv.custom_ops.triton.softmax import divided


@triton.jit
def combine_kernel(
    head_sink,
    output,
    partial_output,
    partial_maximum,
    partial_sum,
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Finish one head: TILE_N splits at a time."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = batch * num_heads + head
    rows = tl.num_programs(1).to(tl.int64) * num_heads
    columns = tl.arange(0, padded(VALUE_HEAD_DIM))[None, :]

    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1, padded(VALUE_HEAD_DIM)], tl.float32)
    for start in range(0, num_splits, TILE_N):
        split = start + tl.arange(0, TILE_N)
        is_split = split < num_splits
        partial = split * rows + row
        maxima = tl.load(partial_maximum + partial, mask=is_split, other=float("-inf")) * LOG2_E
        sums = tl.load(partial_sum + partial, mask=is_split, other=0.0)
        outputs = tl.load(
            partial_output + partial[:, None] * VALUE_HEAD_DIM + columns,
            mask=is_split[:, None] & (columns < VALUE_HEAD_DIM),
            other=0.0,
        )
        larger = tl.maximum(maximum, tl.max(maxima, axis=0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        factors = tl.exp2(maxima - base)
        factor = tl.exp2(maximum - base)
        total = total * factor + tl.sum(sums * factors, axis=0)
        weighted = weighted * factor + tl.sum(outputs * factors[:, None], axis=0)[None, :]
        maximum = larger

    sink = 0.0
    if has(FEATURES, SINK):
        sink = tl.load(head_sink + head) * LOG2_E
    result = divided(maximum, total, weighted, sink, has(FEATURES, SINK))
    if CACHE_BITS != 0:
        result = transform(result, VALUE_HEAD_DIM)
    tl.store(
        output + row * VALUE_HEAD_DIM + columns,
        result.to(output.dtype.element_ty),
        mask=columns < VALUE_HEAD_DIM,
    )
