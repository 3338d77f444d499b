"""The Triton kernels in Triton's interpreter, launched as the launcher would launch them.

TRITON_INTERPRET=1 must be set before this is imported.
"""

import functools
from collections.abc import Mapping
from typing import Any

import contract
import numpy as np
import numpy.typing as npt
import torch

import kernel_packs
from flash_case import Case
from kvconv.custom_ops.triton import append, combine, decode, prefill

TILE = 16
_KERNELS = {
    "append": append.append_kernel,
    "prefill": prefill.prefill_kernel,
    "decode": decode.decode_kernel,
    "combine": combine.combine_kernel,
}


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def arguments_of(kind: str) -> tuple[str, ...]:
    """Return the arguments that a kernel declares, in order."""
    return tuple(name for name in _KERNELS[kind].arg_names if not name.isupper())


def _launch(
    kind: str, grid: tuple[int, int, int], arguments: Mapping[str, Any], variant: contract.Variant
) -> None:
    given: dict[str, Any] = {}
    for name in arguments_of(kind):
        value = arguments[name]
        if kernel_packs.ARGUMENTS[name] < 32:
            value = None if isinstance(value, int) else _tensor(value)
        given[name] = value
    _KERNELS[kind][grid](
        **given,
        HEAD_DIM=variant.head_dim,
        VALUE_HEAD_DIM=variant.value_head_dim,
        GROUP=variant.group,
        ROTARY_DIM=variant.rotary_dim,
        FEATURES=sum(kernel_packs.FEATURES[name] for name in variant.features),
        CACHE_BITS=variant.cache_bits,
        TILE_M=TILE,
        TILE_N=TILE,
    )


KERNELS = {kind: functools.partial(_launch, kind) for kind in _KERNELS}
"""kernel -> call with a grid, arguments by the launcher's names and a variant.

Pointers are flat arrays, 0 where absent, which the kernel writes to.
"""

_SPLIT_SLOTS = 2 * TILE


def run(
    case: Case, inputs: Mapping[str, npt.NDArray[Any]], *, is_ring: bool = False
) -> dict[str, npt.NDArray[Any]]:
    """Run a node's kernels over a shared buffer; returns the op's outputs.

    Args:
        case: In mode `past_sequence_length`; its cache is the type of `inputs["past_key"]`.
        inputs: Of the node. The caches are not written to.
        is_ring: Whether the caches may have fewer rows than there are tokens.
    """
    value_width = case.value_width or case.width
    cache = inputs["past_key"].dtype
    variant = contract.Variant(
        case.width, value_width, case.heads // case.kv_heads,
        (case.rotary_dim or case.width) if case.rotary else 0,
        features_of(case) | ({"ring"} if is_ring else set()),
        {"int8": 8, "uint8": 4}.get(cache.name, 0),
    )  # fmt: skip
    outputs = {
        name.replace("past", "present"): array.copy()
        for name, array in inputs.items()
        if name.startswith(("past_key", "past_value"))
    }
    width = case.heads * value_width
    outputs["output"] = np.full((case.batch, case.new, width), np.nan, case.activation)
    bias = inputs.get("attention_bias")
    strides = [0, 0, 0, 0]
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        steps = [stride // bias.itemsize for stride in bias.strides]
        strides = [step if n > 1 else 0 for n, step in zip(bias.shape, steps, strict=True)]
    capacity = inputs["past_key"].shape[2]
    splits = -(-capacity // _SPLIT_SLOTS)
    partial = (splits, case.batch, case.heads)
    mask, cos = inputs.get("attention_mask"), inputs.get("cos")
    arguments: dict[str, Any] = {name: 0 for name in kernel_packs.ARGUMENTS}
    given = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    arguments |= {name: array.reshape(-1) for name, array in {**given, **outputs}.items()}
    arguments |= {
        "partial_output": np.full((*partial, value_width), np.nan, np.float32).reshape(-1),
        "partial_maximum": np.full(partial, np.nan, np.float32).reshape(-1),
        "partial_sum": np.full(partial, np.nan, np.float32).reshape(-1),
        "query_token_stride": case.heads * case.width,
        "key_token_stride": case.kv_heads * case.width,
        "value_token_stride": case.kv_heads * value_width,
        "sequence_length": case.new,
        "capacity": capacity,
        "mask_width": 0 if mask is None else mask.shape[1],
        "num_heads": case.heads,
        "kv_num_heads": case.kv_heads,
        "rotary_batch_stride": 0 if cos is None or len(cos) == 1 else cos[0].size,
        "window_size": case.window,
        "num_splits": splits,
        "slots_per_split": _SPLIT_SLOTS,
        "scale": case.scale or case.width**-0.5,
        "softcap": case.softcap,
    }  # fmt: skip
    arguments |= dict(zip(
        ("bias_stride_batch", "bias_stride_head", "bias_stride_query", "bias_stride_slot"), strides,
        strict=True,
    ))  # fmt: skip
    tiles = -(-case.new // TILE)
    KERNELS["append"]((tiles, case.kv_heads, case.batch), arguments, variant)
    if case.new > 1:
        KERNELS["prefill"]((tiles, case.heads, case.batch), arguments, variant)
    else:
        KERNELS["decode"]((splits, case.kv_heads, case.batch), arguments, variant)
        KERNELS["combine"]((case.heads, case.batch, 1), arguments, variant)
    return {name: arguments[name].reshape(array.shape) for name, array in outputs.items()}


def features_of(case: Case) -> frozenset[str]:
    """Return the features of a node."""
    wanted = {
        "rotary": case.rotary, "rotary_interleaved": case.rotary == "interleaved",
        "mask": case.padding, "bias": case.bias, "alibi": case.alibi, "sink": case.sink,
        "softcap": case.softcap, "window": case.window, "causal": case.causal,
    }  # fmt: skip
    return frozenset(name for name, is_there in wanted.items() if is_there)
