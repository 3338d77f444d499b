"""The oracle of the numeric tests: attention, rotary embedding and cache append in numpy float64.

Written for obviousness, one formula per step, no shortcuts. The layouts are those of
kvconv::FlashAttention: activations [batch, sequence, heads * width], caches
[batch, kv_heads, slots, width].
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Attributes:
    """The attributes of kvconv::FlashAttention, with its defaults."""

    num_heads: int
    kv_num_heads: int
    scale: float = 0.0
    softcap: float = 0.0
    window_size: int = 0
    causal: bool = True
    rotary_interleaved: bool = False
    rotary_dim: int = 0


def split_heads(x: npt.NDArray, heads: int) -> FloatArray:
    """Turn [batch, sequence, heads * width] into float64 [batch, heads, sequence, width]."""
    batch, sequence, size = x.shape
    return x.astype(np.float64).reshape(batch, sequence, heads, size // heads).transpose(0, 2, 1, 3)


def rotate(x: FloatArray, cos: npt.NDArray, sin: npt.NDArray, *, interleaved: bool) -> FloatArray:
    """Apply the rotary embedding to the first 2 * cos.shape[-1] dimensions of each head.

    Args:
        x: [batch, heads, sequence, width].
        cos: [batch or 1, sequence, rotary_dim / 2]; sin the same.
        interleaved: Pairs are (0, 1), (2, 3) ...; otherwise (0, R / 2), (1, R / 2 + 1) ...
    """
    half = cos.shape[-1]
    c, s = (table.astype(np.float64)[:, None] for table in (cos, sin))
    out = x.copy()
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    x1, x2 = x[..., first], x[..., second]
    out[..., first] = x1 * c - x2 * s
    out[..., second] = x2 * c + x1 * s
    return out


def visible(attributes: Attributes, past: int, new: int, mask: npt.NDArray | None) -> npt.NDArray:
    """Which slots each query sees: bool [batch or 1, 1, new, past + new]."""
    query = past + np.arange(new)[:, None]
    slot = np.arange(past + new)[None, :]
    seen = np.ones((new, past + new), dtype=bool)
    if attributes.causal:
        seen &= slot <= query
    if attributes.window_size:
        seen &= slot > query - attributes.window_size
    seen = seen[None, None]
    if mask is not None:
        seen = seen & (mask[:, None, None, : past + new] != 0)
    return seen


def attention(
    attributes: Attributes,
    query: npt.NDArray,
    keys: npt.NDArray,
    values: npt.NDArray,
    past: int,
    *,
    mask: npt.NDArray | None = None,
    bias: npt.NDArray | None = None,
    alibi_slopes: npt.NDArray | None = None,
    head_sink: npt.NDArray | None = None,
) -> FloatArray:
    """Attend with rotated queries [batch, heads, new, width] over the first past + new slots.

    A slot that is not seen contributes nothing, whatever it holds; a query that sees none gives 0.

    Returns:
        [batch, new, heads * value_width] float64.
    """
    group = attributes.num_heads // attributes.kv_num_heads
    new = query.shape[2]
    total = past + new
    keys = np.repeat(keys[:, :, :total].astype(np.float64), group, axis=1)
    values = np.repeat(values[:, :, :total].astype(np.float64), group, axis=1)
    seen = visible(attributes, past, new, mask)

    scores = query @ keys.swapaxes(-1, -2) * (attributes.scale or query.shape[-1] ** -0.5)
    if attributes.softcap:
        scores = attributes.softcap * np.tanh(scores / attributes.softcap)
    if alibi_slopes is not None:
        distance = np.arange(total)[None, :] - (past + np.arange(new))[:, None]
        scores = scores + alibi_slopes.astype(np.float64)[:, None, None] * distance
    if bias is not None:
        scores = scores + bias.astype(np.float64)
    seen = np.broadcast_to(seen, scores.shape)
    scores = np.where(seen, scores, -np.inf)

    sink = np.full(attributes.num_heads, -np.inf) if head_sink is None else head_sink
    sink = sink.astype(np.float64)[None, :, None, None]
    maximum = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    maximum = np.where(np.isneginf(maximum), 0.0, maximum)
    weights = np.exp(scores - maximum)
    denominator = weights.sum(-1, keepdims=True) + np.exp(sink - maximum)
    weights = weights / np.where(denominator == 0, 1.0, denominator)

    # 0 * NaN is NaN: an unseen slot must not even be multiplied.
    out = np.zeros((*scores.shape[:3], values.shape[-1]))
    for index in np.ndindex(*scores.shape[:3]):
        chosen = seen[index] & (weights[index] != 0)
        out[index] = weights[index][chosen] @ values[index[0], index[1]][chosen]
    batch = query.shape[0]
    return out.transpose(0, 2, 1, 3).reshape(batch, new, attributes.num_heads * out.shape[-1])


def append(cache: npt.NDArray, new: FloatArray, past: int) -> npt.NDArray:
    """Return a copy of the cache with `new` in slots [past, past + new), rounded to its dtype."""
    out = cache.copy()
    out[:, :, past : past + new.shape[2]] = new.astype(cache.dtype)
    return out
