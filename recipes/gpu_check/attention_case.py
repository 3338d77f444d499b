"""One attention on the GPU: its tensors, the op on them, and what PyTorch says it should be."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from kvconv.bench.bare_op import BareOp, DeviceTensor
from kvconv.cache_layout import stored_tensors
from kvconv.custom_ops.triton.variants import Attention, Feature
from kvconv.manifest import CacheDtype, CacheLayer

TYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int32: 6, torch.int64: 7,
    torch.float16: 10, torch.bfloat16: 16,
}  # fmt: skip
"""ONNX's element types."""
_CACHE_TYPES = {"float32": 1, "int4": 2, "int8": 3, "float16": 10, "bfloat16": 16}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and features of an attention; rotary tables, masks and the like are made up.

    Attributes:
        num_heads: Query heads.
        kv_num_heads: Key and value heads.
        head_dim: Numbers of a query or key head.
        value_head_dim: Of a value head.
        dtype: Of queries, keys, values and outputs.
        cache: How the cache keeps its numbers.
        features: What the node has.
        batch: Rows.
        rotary_dim: Numbers of a head that are rotated.
        window: Tokens that a query sees, with the feature.
    """

    num_heads: int = 8
    kv_num_heads: int = 2
    head_dim: int = 64
    value_head_dim: int = 64
    dtype: torch.dtype = torch.float16
    cache: CacheDtype = "float16"
    features: Feature = Feature.CAUSAL
    batch: int = 2
    rotary_dim: int = 0
    window: int = 0

    @property
    def attention(self) -> Attention:
        """What the kernels are compiled for."""
        rotated = Feature.ROTARY in self.features
        return Attention(
            TYPES[self.dtype],
            _CACHE_TYPES[self.cache],
            self.head_dim,
            self.value_head_dim,
            self.num_heads // self.kv_num_heads,
            (self.rotary_dim or self.head_dim) if rotated else 0,
            self.features,
        )

    @property
    def layer(self) -> CacheLayer:
        """The cache."""
        return CacheLayer(self.kv_num_heads, self.head_dim, self.value_head_dim, self.cache)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def softcap(self) -> float:
        """Of the scores; 0 without."""
        return 5.0 if Feature.SOFTCAP in self.features else 0.0

    def __str__(self) -> str:
        features = "+".join(str(feature.name).lower() for feature in self.features)
        return (
            f"{str(self.dtype)[6:]}, {self.cache} cache, {self.num_heads}/{self.kv_num_heads} "
            f"heads of {self.head_dim}/{self.value_head_dim}, {features}"
        )


class Op:
    """The node of a case, its cache and its constants on the device.

    Args:
        case: What to make.
        kernels: A file of kernels that has those of the case.
        capacity: Slots of the cache.
    """

    def __init__(self, case: Case, kernels: bytes, capacity: int) -> None:
        self.case, self.capacity = case, capacity
        self._scratch: dict[int, Tensor] = {}
        features = case.features
        self._op = BareOp(
            activation=TYPES[case.dtype],
            cache=_CACHE_TYPES[case.cache],
            attributes={
                "num_heads": case.num_heads,
                "kv_num_heads": case.kv_num_heads,
                "scale": case.scale,
                "softcap": case.softcap,
                "causal": int(Feature.CAUSAL in features),
                "window_size": case.window if Feature.WINDOW in features else 0,
                "rotary_interleaved": int(Feature.ROTARY_INTERLEAVED in features),
                "rotary_dim": case.rotary_dim,
                "cache_mode": "ring" if Feature.RING in features else "auto",
            },
            kernels=kernels,
            allocate=self._allocate,
            free=lambda address: self._scratch.pop(address) and None,
            stream=torch.cuda.current_stream().cuda_stream,
        )
        self.cache = self.new_cache()
        self.past = torch.zeros(1, dtype=torch.int32, device="cuda")
        heads = case.num_heads
        self.constants: dict[str, Tensor] = {}
        if Feature.ALIBI in features:
            self.constants["alibi_slopes"] = 2.0 ** -torch.linspace(1, 8, heads, device="cuda")
        if Feature.SINK in features:
            self.constants["head_sink"] = torch.linspace(-1, 2, heads, device="cuda")
        if Feature.MASK in features:
            mask = torch.ones(case.batch, capacity, dtype=torch.int64, device="cuda")
            mask[0, :3] = 0
            self.constants["attention_mask"] = mask

    def new_cache(self, *, filled: bool = False) -> dict[str, Tensor]:
        """Return an empty cache, by the names of its tensors; or one with random numbers."""
        cache = {}
        for stored in stored_tensors(self.case.layer):
            shape = (self.case.batch, stored.num_heads, self.capacity, stored.width)
            tensor = torch.zeros(shape, dtype=getattr(torch, stored.element), device="cuda")
            if filled and tensor.is_floating_point():
                tensor.normal_()
            elif filled:
                tensor.random_(127)
            cache[stored.name] = tensor
        return cache

    def inputs(self, past: int, tokens: int) -> dict[str, Tensor]:
        """Make up the tensors of new tokens, and the rest of what a run of them reads."""
        case = self.case

        def random(width: int) -> Tensor:
            return torch.randn(case.batch, tokens, width, device="cuda").to(case.dtype)

        made = {
            "query": random(case.num_heads * case.head_dim),
            "key": random(case.kv_num_heads * case.head_dim),
            "value": random(case.kv_num_heads * case.value_head_dim),
            **self.constants,
        }
        if Feature.ROTARY in case.features:
            half = (case.rotary_dim or case.head_dim) // 2
            positions = torch.arange(past, past + tokens, device="cuda")
            angles = positions[:, None] * 10000.0 ** -(torch.arange(half, device="cuda") / half)
            made |= {"cos": angles.cos()[None].contiguous(), "sin": angles.sin()[None].contiguous()}
        if Feature.BIAS in case.features:
            bias = torch.randn(1, case.num_heads, tokens, self.capacity, device="cuda")
            made["attention_bias"] = bias.to(case.dtype)
        return made

    def run(
        self, inputs: dict[str, Tensor], output: Tensor, cache: dict[str, Tensor] | None = None
    ) -> None:
        """Launch one run behind the tokens that `past` counts; the cache is changed in place."""
        cache = self.cache if cache is None else cache
        given = {name: _described(tensor) for name, tensor in inputs.items()}
        given["past_sequence_length"] = _described(self.past)
        stored = {name: _described(tensor) for name, tensor in cache.items()}
        given |= {f"past_{name}": tensor for name, tensor in stored.items()}
        outputs = {f"present_{name}": tensor for name, tensor in stored.items()}
        self._op.run(given, {"output": _described(output), **outputs})

    def output(self, tokens: int) -> Tensor:
        """Return memory for the output of a run."""
        case = self.case
        width = case.num_heads * case.value_head_dim
        return torch.full((case.batch, tokens, width), math.nan, dtype=case.dtype, device="cuda")

    def close(self) -> None:
        """Unload the kernels."""
        torch.cuda.synchronize()
        self._op.close()

    def _allocate(self, num_bytes: int) -> int:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._scratch[memory.data_ptr()] = memory
        return memory.data_ptr()


def _described(tensor: Tensor) -> DeviceTensor:
    return DeviceTensor(TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())


def rotate(heads: Tensor, inputs: dict[str, Any], *, interleaved: bool) -> Tensor:
    """Rotate [batch, heads, tokens, head_dim] by the tables of a run."""
    cos, sin = (inputs[name].double()[:, None] for name in ("cos", "sin"))
    width = 2 * cos.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., : width // 2], turned[..., width // 2 :]
    parts = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([joined, rest], -1)


def expect(case: Case, runs: list[dict[str, Tensor]]) -> Tensor:
    """Return the output of the last of several runs, by float64 arithmetic.

    Args:
        case: The attention.
        runs: The inputs of each run, one behind the other.
    """
    features = case.features
    interleaved = Feature.ROTARY_INTERLEAVED in features

    def split(tensor: Tensor, count: int) -> Tensor:
        return tensor.double().unflatten(-1, (count, -1)).transpose(1, 2)

    def turned(run: dict[str, Tensor], name: str, count: int) -> Tensor:
        heads = split(run[name], count)
        return rotate(heads, run, interleaved=interleaved) if "cos" in run else heads

    last = runs[-1]
    query = turned(last, "query", case.num_heads)
    key = torch.cat([turned(run, "key", case.kv_num_heads) for run in runs], 2)
    value = torch.cat([split(run["value"], case.kv_num_heads) for run in runs], 2)
    group = case.num_heads // case.kv_num_heads
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = case.scale * query @ key.transpose(2, 3)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    total, tokens = key.shape[2], query.shape[2]
    columns = torch.arange(total, device=query.device)
    rows = torch.arange(total - tokens, total, device=query.device)[:, None]
    if "attention_bias" in last:
        scores = scores + last["attention_bias"].double()[..., :total]
    if "alibi_slopes" in last:
        scores = scores + last["alibi_slopes"].double()[:, None, None] * (columns - rows)
    seen = torch.ones(1, 1, tokens, total, dtype=torch.bool, device=query.device)
    if Feature.CAUSAL in features:
        seen = seen & (columns <= rows)
    if Feature.WINDOW in features:
        seen = seen & (rows - columns < case.window)
    if "attention_mask" in last:
        seen = seen & (last["attention_mask"][:, None, None, :total] != 0)
    scores = scores.masked_fill(~seen, -math.inf)
    if "head_sink" in last:
        sink = last["head_sink"].double()[None, :, None, None]
        scores = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :total]  # nothing attended: zeros
    return (weights @ value).transpose(1, 2).flatten(2)
