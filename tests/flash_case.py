"""Runs of kvconv::FlashAttention with random inputs, and what the oracle says of them."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

import reference
import single_node

Mode = Literal["shared", "past_sequence_length", "concat"]
MODES: tuple[Mode, ...] = ("shared", "past_sequence_length", "concat")


@dataclass(frozen=True)
class Case:
    """A run of the op: sizes, features and types. Every input is random from `seed`."""

    batch: int = 1
    new: int = 5
    past: int = 3
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    value_width: int = 0  # 0 = width
    scale: float = 0.0
    softcap: float = 0.0
    window: int = 0
    causal: bool = True
    rotary: Literal["", "half", "interleaved"] = ""
    rotary_dim: int = 0
    rotary_batch: int = 1
    padding: Literal["", "left", "right", "holes", "none attended"] = ""
    bias: tuple[int, ...] | None = None  # 1 where it broadcasts, else anything
    alibi: bool = False
    sink: bool = False
    activation: str = "float32"
    cache: str = "float32"
    mode: Mode = "shared"
    spare: int = 7  # slots of a shared buffer beyond those used
    threads: int = 1
    seed: int = 0
    poison: bool = False  # fill what nobody may read with NaN
    packed: bool = False  # query, key and value go into the node as one tensor

    @property
    def total(self) -> int:
        return self.past + self.new

    @property
    def capacity(self) -> int:
        return self.past if self.mode == "concat" else self.total + self.spare

    @property
    def attributes(self) -> reference.Attributes:
        return reference.Attributes(
            num_heads=self.heads,
            kv_num_heads=self.kv_heads,
            scale=self.scale,
            softcap=self.softcap,
            window_size=self.window,
            causal=self.causal,
            rotary_interleaved=self.rotary == "interleaved",
            rotary_dim=self.rotary_dim,
        )

    @property
    def node_attributes(self) -> dict[str, int | float | str]:
        return {name: value for name, value in vars(self.attributes).items() if value != 0} | {
            "causal": int(self.causal),
            "rotary_interleaved": int(self.rotary == "interleaved"),
        }


def to_cache(x: npt.NDArray, kind: str) -> npt.NDArray:
    return single_node.to_bfloat16(x) if kind == "bfloat16" else x.astype(kind)


def from_cache(x: npt.NDArray, kind: str) -> npt.NDArray:
    return single_node.from_bfloat16(x) if kind == "bfloat16" else x


def make_mask(case: Case, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    mask = np.ones((case.batch, case.total), dtype=np.int64)
    for b in range(case.batch):
        length = int(rng.integers(1, case.total)) if case.total > 1 else 0
        if case.padding == "left":
            mask[b, :length] = 0
        elif case.padding == "right":
            mask[b, length:] = 0
        elif case.padding == "holes":
            mask[b] = rng.integers(0, 2, case.total)
        elif case.padding == "none attended" and b == 0:
            mask[b] = 0
    return mask


def make_inputs(case: Case) -> dict[str, npt.NDArray]:
    """Random inputs of the node, in the cache's storage dtype (bfloat16 as uint16 bits)."""
    rng = np.random.default_rng(case.seed)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    width, value_width = case.width, case.value_width or case.width
    inputs: dict[str, npt.NDArray] = {
        "query": normal(case.batch, case.new, case.heads * width).astype(case.activation),
        "key": normal(case.batch, case.new, case.kv_heads * width).astype(case.activation),
        "value": normal(case.batch, case.new, case.kv_heads * value_width).astype(case.activation),
    }
    for name, size in (("past_key", width), ("past_value", value_width)):
        past = normal(case.batch, case.kv_heads, case.capacity, size)
        if case.poison:
            past[:, :, case.past :] = np.nan
        inputs[name] = to_cache(past, case.cache)
    mask = make_mask(case, rng)
    if case.poison:
        for b, j in np.argwhere(mask[:, : case.past] == 0):
            inputs["past_key"][b, :, j] = to_cache(np.float32([np.nan]), case.cache)
            inputs["past_value"][b, :, j] = to_cache(np.float32([np.nan]), case.cache)
    if case.mode == "past_sequence_length":
        inputs["past_sequence_length"] = np.array([case.past], dtype=np.int32)
        if case.padding:  # as wide as the capacity; what lies beyond total must not matter
            wide = np.ones((case.batch, case.capacity), dtype=np.int64)
            wide[:, : case.total] = mask
            inputs["attention_mask"] = wide
    else:
        inputs["attention_mask"] = mask
    if case.rotary:
        angles = normal(case.rotary_batch, case.new, (case.rotary_dim or width) // 2) * 3
        inputs["cos"], inputs["sin"] = np.cos(angles), np.sin(angles)
    if case.bias is not None:
        full = (case.batch, case.heads, case.new, case.total)[4 - len(case.bias) :]
        shape = [1 if b == 1 else f for b, f in zip(case.bias, full, strict=True)]
        inputs["attention_bias"] = normal(*shape).astype(case.activation)
    if case.alibi:
        inputs["alibi_slopes"] = (2.0 ** -np.arange(1, case.heads + 1)).astype(np.float32)
    if case.sink:
        inputs["head_sink"] = normal(case.heads) * 2
    return inputs


def pack(inputs: dict[str, npt.NDArray]) -> dict[str, npt.NDArray]:
    """The same inputs with query, key and value side by side in query."""
    parts = [inputs[name] for name in ("query", "key", "value")]
    rest = {name: array for name, array in inputs.items() if name not in ("key", "value")}
    return rest | {"query": np.concatenate(parts, axis=2)}


def expected_caches(case: Case, inputs: dict[str, npt.NDArray]) -> tuple[npt.NDArray, ...]:
    """What the oracle says present_key and present_value hold, in the storage dtype."""
    key = reference.split_heads(inputs["key"], case.kv_heads)
    value = reference.split_heads(inputs["value"], case.kv_heads)
    if case.rotary:
        interleaved = case.rotary == "interleaved"
        key = reference.rotate(key, inputs["cos"], inputs["sin"], interleaved=interleaved)
    caches = []
    for name, new in (("past_key", key), ("past_value", value)):
        past = inputs[name]
        if case.mode == "concat":
            past = np.concatenate([past, np.zeros_like(past, shape=new.shape)], axis=2)
        rounded = to_cache(new.astype(np.float32), case.cache)
        caches.append(reference.append(past, rounded, case.past))
    return tuple(caches)


def expected_output(
    case: Case, inputs: dict[str, npt.NDArray], caches: tuple[npt.NDArray, ...]
) -> npt.NDArray:
    """What the oracle says the output is, over caches that are filled already."""
    query = reference.split_heads(inputs["query"], case.heads)
    if case.rotary:
        interleaved = case.rotary == "interleaved"
        query = reference.rotate(query, inputs["cos"], inputs["sin"], interleaved=interleaved)
    return reference.attention(
        case.attributes,
        query,
        *(from_cache(cache, case.cache) for cache in caches),
        case.past,
        mask=inputs.get("attention_mask"),
        bias=inputs.get("attention_bias"),
        alibi_slopes=inputs.get("alibi_slopes"),
        head_sink=inputs.get("head_sink"),
    )
