"""What each CUDA kernel has to do, in numpy: from the arguments that it is launched with alone.

A launch is done for all of its programs at once, over float caches. Letters as in
custom_ops/include/kvconv/attention.h.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import reference

Arguments = Mapping[str, Any]
"""By the names of `kernel_packs.ARGUMENTS`; pointers are arrays, to the end of their memory."""


@dataclass(frozen=True)
class Variant:
    """What a kernel was compiled for."""

    head_dim: int
    value_head_dim: int
    group: int
    rotary_dim: int
    features: frozenset[str]


def tokens(pointer: npt.NDArray, stride: int, shape: tuple[int, ...]) -> npt.NDArray:
    """Return [B, S, heads, width] of a packed projection."""
    batch, sequence, _, width = shape
    size = pointer.itemsize
    strides = (sequence * stride * size, stride * size, width * size, size)
    return np.lib.stride_tricks.as_strided(pointer, shape, strides)


def whole(pointer: npt.NDArray, *shape: int) -> npt.NDArray:
    """Return a contiguous tensor."""
    return pointer[: int(np.prod(shape))].reshape(shape)


def rotated(a: Arguments, v: Variant, x: npt.NDArray) -> npt.NDArray:
    """Rotate [B, S, heads, H]."""
    x = x.astype(np.float64)
    if "rotary" not in v.features:
        return x
    batch, sequence = x.shape[:2]
    rows = batch if a["rotary_batch_stride"] else 1
    tables = [whole(a[name], rows, sequence, v.rotary_dim // 2) for name in ("cos", "sin")]
    interleaved = "rotary_interleaved" in v.features
    turned = reference.rotate(x.transpose(0, 2, 1, 3), *tables, interleaved=interleaved)
    return turned.transpose(0, 2, 1, 3)


def append(grid: tuple[int, int, int], a: Arguments, v: Variant) -> None:
    """Write rotated keys, and values, into rows (past + i) mod C."""
    _, kv_heads, batch = grid
    new, capacity = a["sequence_length"], a["capacity"]
    assert a["kv_num_heads"] == kv_heads
    past = int(a["past_sequence_length"][0])
    rows = (past + np.arange(new)) % capacity if "ring" in v.features else past + np.arange(new)
    for name, width in (("key", v.head_dim), ("value", v.value_head_dim)):
        shape = (batch, new, kv_heads, width)
        x = tokens(a[name], a[f"{name}_token_stride"], shape)
        x = rotated(a, v, x) if name == "key" else x
        present = whole(a[f"present_{name}"], batch, kv_heads, capacity, width)
        kept = rows < capacity
        present[:, :, rows[kept]] = x.transpose(0, 2, 1, 3)[:, :, kept].astype(present.dtype)


def scores(
    a: Arguments, v: Variant, batch: int, slots: npt.NDArray[np.int64]
) -> tuple[npt.NDArray, npt.NDArray]:
    """Return scores [B, N, S, slots], -inf where unseen, and values [B, N, slots, Hv]."""
    heads, kv_heads, capacity = (a[name] for name in ("num_heads", "kv_num_heads", "capacity"))
    new = a.get("sequence_length", 1)  # decode has one token and does not take its number
    assert heads == kv_heads * v.group
    past = int(a["past_sequence_length"][0])
    query = tokens(a["query"], a["query_token_stride"], (batch, new, heads, v.head_dim))
    query = rotated(a, v, query).transpose(0, 2, 1, 3)
    rows = slots % capacity
    keys = whole(a["present_key"], batch, kv_heads, capacity, v.head_dim)[:, :, rows]
    values = whole(a["present_value"], batch, kv_heads, capacity, v.value_head_dim)[:, :, rows]
    keys, values = (np.repeat(x.astype(np.float64), v.group, axis=1) for x in (keys, values))
    own = past + np.arange(new)[:, None]
    seen = np.broadcast_to(slots < past + new, (batch, 1, new, len(slots))).copy()
    if "causal" in v.features:
        seen &= slots <= own
    if "window" in v.features:
        seen &= slots > own - a["window_size"]
    if "mask" in v.features:
        mask = whole(a["attention_mask"], batch, a["mask_width"])
        inside = np.minimum(slots, a["mask_width"] - 1)
        seen &= ((mask[:, inside] != 0) & (slots < a["mask_width"]))[:, None, None]
    result = query @ np.where(np.isfinite(keys), keys, 0).swapaxes(-1, -2) * a["scale"]
    if "softcap" in v.features:
        result = a["softcap"] * np.tanh(result / a["softcap"])
    if "alibi" in v.features:
        result += whole(a["alibi_slopes"], heads)[:, None, None] * (slots - own)
    if "bias" in v.features:
        b, h, q = (np.arange(n) for n in (batch, heads, new))
        index = (
            b[:, None, None, None] * a["bias_stride_batch"]
            + h[:, None, None] * a["bias_stride_head"]
            + q[:, None] * a.get("bias_stride_query", 0)
            + np.minimum(slots, past + new - 1) * a["bias_stride_slot"]
        )
        result += a["attention_bias"][index]
    return np.where(seen, result, -np.inf), np.where(np.isfinite(values), values, 0)


def softmax_parts(s: npt.NDArray, values: npt.NDArray) -> tuple[npt.NDArray, ...]:
    """Return maximum and sum [B, N, S] and the sum of weighted values [B, N, S, Hv]."""
    maximum = s.max(-1, initial=-np.inf)
    weights = np.exp(s - np.where(np.isneginf(maximum), 0, maximum)[..., None])
    return maximum, weights.sum(-1), weights @ values


def finished(
    a: Arguments, v: Variant, maximum: npt.NDArray, total: npt.NDArray, weighted: npt.NDArray
) -> npt.NDArray:
    """Divide by the sum, the sink in it; rows that see nothing are 0."""
    if "sink" in v.features:
        sink = whole(a["head_sink"], maximum.shape[1]).astype(np.float64)[None, :, None]
        larger = np.maximum(maximum, sink)
        factor = np.exp(maximum - larger)
        total = total * factor + np.exp(sink - larger)
        weighted = weighted * factor[..., None]
    return weighted / np.where(total == 0, 1, total)[..., None]


def prefill(grid: tuple[int, int, int], a: Arguments, v: Variant) -> None:
    """Attend over the cache, which holds the new tokens already."""
    _, heads, batch = grid
    assert a["num_heads"] == heads
    new = a["sequence_length"]
    slots = np.arange(int(a["past_sequence_length"][0]) + new)
    result = finished(a, v, *softmax_parts(*scores(a, v, batch, slots)))
    output = whole(a["output"], batch, new, heads, v.value_head_dim)
    output[...] = result.transpose(0, 2, 1, 3)


def decode(grid: tuple[int, int, int], a: Arguments, v: Variant) -> None:
    """Leave the partial softmax of each split of slots."""
    num_splits, kv_heads, batch = grid
    assert a["num_splits"] == num_splits
    assert a["kv_num_heads"] == kv_heads
    heads = kv_heads * v.group
    total = int(a["past_sequence_length"][0]) + 1
    outputs = whole(a["partial_output"], num_splits, batch, heads, v.value_head_dim)
    maxima, sums = (
        whole(a[name], num_splits, batch, heads) for name in ("partial_maximum", "partial_sum")
    )
    # In a ring a split is one of rows: it has the newest slots that lie there.
    for split in range(num_splits):
        rows = np.arange(split * a["slots_per_split"], (split + 1) * a["slots_per_split"])
        rows = rows[rows < a["capacity"]]
        slots = rows + np.maximum(0, (total - 1 - rows) // a["capacity"]) * a["capacity"]
        maximum, sum_, weighted = softmax_parts(*scores(a, v, batch, slots[slots < total]))
        maxima[split], sums[split], outputs[split] = (
            maximum[..., 0],
            sum_[..., 0],
            weighted[:, :, 0],
        )


def combine(grid: tuple[int, int, int], a: Arguments, v: Variant) -> None:
    """Add the partials up."""
    heads, batch, _ = grid
    num_splits = a["num_splits"]
    outputs = whole(a["partial_output"], num_splits, batch, heads, v.value_head_dim)
    maxima, sums = (
        whole(a[name], num_splits, batch, heads) for name in ("partial_maximum", "partial_sum")
    )
    maximum = maxima.max(0).astype(np.float64)
    factors = np.exp(maxima - np.where(np.isneginf(maximum), 0, maximum))
    weighted = (outputs * factors[..., None]).sum(0)
    result = finished(
        a, v, maximum[..., None], (sums * factors).sum(0)[..., None], weighted[:, :, None]
    )
    whole(a["output"], batch, heads, v.value_head_dim)[...] = result[:, :, 0]


KERNELS = {"append": append, "prefill": prefill, "decode": decode, "combine": combine}
