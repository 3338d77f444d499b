"""Writes new keys (rotated) and values into the cache: grid (ceil(S / TILE_M), K, B)."""

import triton
import triton.language as tl

from kvconv.custom_ops.triton.rows import has, load_rotated, store_row


@triton.jit
def append_kernel(
    key, value, present_key, present_value, present_key_scale, present_value_scale, cos, sin,
    past_sequence_length, key_token_stride, value_token_stride, sequence_length, capacity,
    kv_num_heads, rotary_batch_stride,
    HEAD_DIM: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FEATURES: tl.constexpr, CACHE_BITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Take TILE_M tokens of one head of one batch row into rows (past + i) mod C."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    rows = tl.load(past_sequence_length) + i
    if has(FEATURES, "ring"):
        rows = rows % capacity
    is_row = (i < sequence_length) & (rows < capacity)
    rows = (batch * kv_num_heads + head) * capacity + rows
    tokens = batch * sequence_length + i
    angles = i * (ROTARY_DIM // 2)
    if ROTARY_DIM > 0:
        angles = batch * rotary_batch_stride + angles

    keys = key + tokens * key_token_stride + head * HEAD_DIM
    x = load_rotated(keys, is_row, cos, sin, angles, HEAD_DIM, ROTARY_DIM, FEATURES)
    store_row(x, present_key, present_key_scale, rows, is_row, TILE_M, HEAD_DIM, CACHE_BITS, True)
    values = value + tokens * value_token_stride + head * VALUE_HEAD_DIM
    x = load_rotated(values, is_row, None, None, angles, VALUE_HEAD_DIM, 0, 0)
    store_row(
        x, present_value, present_value_scale, rows, is_row, TILE_M, VALUE_HEAD_DIM, CACHE_BITS,
        False,
    )  # fmt: skip
