"""Runs of the Triton kernels in Triton's interpreter, launched as the op launches them.

TRITON_INTERPRET=1 must be set before this is imported.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flash_case import Case
from kvconv.custom_ops.triton.append import append_kernel
from kvconv.custom_ops.triton.combine import combine_kernel
from kvconv.custom_ops.triton.decode import decode_kernel
from kvconv.custom_ops.triton.prefill import prefill_kernel
from kvconv.custom_ops.triton.rows import FEATURES

KERNELS = {
    "append": append_kernel,
    "prefill": prefill_kernel,
    "decode": decode_kernel,
    "combine": combine_kernel,
}
TILE = 16


def features_of(case: Case, inputs: dict[str, npt.NDArray[Any]], ring: bool) -> int:
    """The bits of a node."""
    wanted = {
        "rotary": "cos" in inputs,
        "rotary_interleaved": case.rotary == "interleaved",
        "mask": "attention_mask" in inputs,
        "bias": "attention_bias" in inputs,
        "alibi": "alibi_slopes" in inputs,
        "sink": "head_sink" in inputs,
        "softcap": case.softcap > 0,
        "window": case.window > 0,
        "ring": ring,
        "causal": case.causal,
    }
    return sum(FEATURES[name] for name, is_there in wanted.items() if is_there)


def tensor(array: npt.NDArray[Any], kind: str) -> torch.Tensor:
    """A tensor of the array's bits; bfloat16 is uint16 in numpy."""
    array = np.ascontiguousarray(array)
    if kind == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def array(x: torch.Tensor) -> npt.NDArray[Any]:
    """The other way round."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def bias_strides(bias: npt.NDArray[Any]) -> list[int]:
    """Elements from one batch row, head, query and slot to the next; 0 where it is broadcast."""
    shape = (1,) * (4 - bias.ndim) + bias.shape
    strides = np.cumprod((1, *shape[:0:-1]))[::-1]
    return [int(s) if size > 1 else 0 for s, size in zip(strides, shape, strict=True)]


def run(
    case: Case,
    inputs: dict[str, npt.NDArray[Any]],
    *,
    cache_bits: int = 0,
    ring: bool = False,
    num_splits: int = 3,
    packed: bool = False,
) -> dict[str, npt.NDArray[Any]]:
    """Launch append, then prefill, or decode and combine.

    Args:
        case: Sizes and attributes; its capacity is that of the inputs.
        inputs: Of the node, with past_* as the cache that is written in place.
        cache_bits: 8 or 4 where codes and scales are given.
        ring: Whether the cache is a ring.
        num_splits: Of decode.
        packed: Let query, key and value lie in one tensor.

    Returns:
        output [B, S, N, Hv] and present_* as the op would give them.
    """
    value_width = case.value_width or case.width
    capacity = inputs["past_key"].shape[2]
    group = case.heads // case.kv_heads
    sizes = {"query": case.heads * case.width, "key": case.kv_heads * case.width}
    sizes["value"] = case.kv_heads * value_width
    given = {name: tensor(inputs[name], case.activation) for name in sizes}
    strides = dict(sizes)
    if packed:
        whole = torch.cat(list(given.values()), dim=2).contiguous()
        starts = np.cumsum([0, *sizes.values()])
        given = {
            name: whole.view(-1)[int(start) :] for name, start in zip(given, starts, strict=False)
        }
        strides = dict.fromkeys(sizes, whole.shape[2])
    presents = {
        f"present_{side}": tensor(inputs[f"past_{side}"], "" if cache_bits else case.cache)
        for side in ("key", "value")
    }
    for side in ("key", "value") if cache_bits else ():
        presents[f"present_{side}_scale"] = tensor(inputs[f"past_{side}_scale"], "bfloat16")
    output = torch.full((case.batch, case.new, case.heads, value_width), torch.nan).to(
        given["query"].dtype
    )
    partial_shape = (num_splits, case.batch, case.heads)
    values: dict[str, object] = (
        given
        | presents
        | {
            name: tensor(inputs[name], "")
            for name in (
                "attention_mask",
                "cos",
                "sin",
                "attention_bias",
                "alibi_slopes",
                "head_sink",
            )
            if name in inputs
        }
    )
    values |= {f"{name}_token_stride": stride for name, stride in strides.items()}
    if "attention_bias" in inputs:
        names = ("batch", "head", "query", "slot")
        sizes_ = bias_strides(inputs["attention_bias"])
        values |= {f"bias_stride_{n}": s for n, s in zip(names, sizes_, strict=True)}
    if "attention_mask" in inputs:
        values["mask_width"] = inputs["attention_mask"].shape[1]
    if "cos" in inputs:
        is_batched = inputs["cos"].shape[0] > 1
        values["rotary_batch_stride"] = inputs["cos"][0].size if is_batched else 0
    values |= {
        "past_sequence_length": torch.tensor([case.past], dtype=torch.int32),
        "output": output,
        "partial_output": torch.full((*partial_shape, value_width), torch.nan),
        "partial_maximum": torch.full(partial_shape, torch.nan),
        "partial_sum": torch.full(partial_shape, torch.nan),
        "sequence_length": case.new,
        "capacity": capacity,
        "num_heads": case.heads,
        "kv_num_heads": case.kv_heads,
        "num_splits": num_splits,
        "slots_per_split": -(-capacity // (num_splits * TILE)) * TILE,
        "scale": case.scale or case.width**-0.5,
    }
    if case.window:
        values["window_size"] = case.window
    if case.softcap:
        values["softcap"] = case.softcap
    values |= {
        "HEAD_DIM": case.width,
        "VALUE_HEAD_DIM": value_width,
        "GROUP": group,
        "ROTARY_DIM": (case.rotary_dim or case.width) if case.rotary else 0,
        "FEATURES": features_of(case, inputs, ring),
        "CACHE_BITS": cache_bits,
        "TILE_M": max(TILE, 1 << (group - 1).bit_length()) if case.new == 1 else TILE,
        "TILE_N": TILE,
    }
    grids = {
        "append": (-(-case.new // TILE), case.kv_heads, case.batch),
        "prefill": (-(-case.new // TILE), case.heads, case.batch),
        "decode": (num_splits, case.kv_heads, case.batch),
        "combine": (case.heads, case.batch),
    }
    for kind in ("append", "decode", "combine") if case.new == 1 else ("append", "prefill"):
        kernel = KERNELS[kind]
        kernel[grids[kind]](**{name: values.get(name) for name in kernel.arg_names})
    return {name: array(x) for name, x in presents.items()} | {"output": array(output)}
