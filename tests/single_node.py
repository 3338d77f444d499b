"""A session around one kvconv::FlashAttention node, for tests.

Caches may be bfloat16, which numpy lacks: they are carried as uint16 bit patterns here and turned
into OrtValues by dtype name.
"""

import ctypes
from collections.abc import Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto, helper

import one_node
from kvconv import names

ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
}
RANKS = {"attention_mask": 2, "alibi_slopes": 1, "head_sink": 1, "past_sequence_length": 1}
OUTPUTS = names.FLASH_ATTENTION_OUTPUTS[:3]
SCALES = ("past_key_scale", "past_value_scale", "present_key_scale", "present_value_scale")


def to_bfloat16(x: npt.NDArray) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bit patterns, to nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widen bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def input_type(name: str, activation: str, cache_type: str) -> str:
    """Return the dtype name of an input of the node."""
    if name in ("query", "key", "value", "attention_bias"):
        return activation
    if name in ("past_key", "past_value"):
        return cache_type
    if name in SCALES:
        return "bfloat16"
    return {"attention_mask": "int64", "past_sequence_length": "int32"}.get(name, "float32")


@cache
def make_session(
    inputs: tuple[tuple[str, int], ...],
    attributes: tuple[tuple[str, int | float | str], ...],
    activation: str = "float32",
    cache_type: str = "float32",
    outputs: tuple[str, ...] = OUTPUTS,
    threads: int = 1,
) -> onnxruntime.InferenceSession:
    """Build a session of one node.

    Args:
        inputs: (name, rank) of each input that is there, in any order; the others are absent.
        attributes: (name, value) of each attribute.
        activation: dtype of query, key, value, attention_bias and output.
        cache_type: dtype of past and present.
        outputs: Names of the outputs the node has.
        threads: Size of ONNX Runtime's pool.
    """
    given = dict(inputs)
    node = helper.make_node(
        names.OP_NAME,
        [name if name in given else "" for name in names.FLASH_ATTENTION_INPUTS],
        [name if name in outputs else "" for name in names.FLASH_ATTENTION_OUTPUTS],
        domain=names.OP_DOMAIN,
        **dict(attributes),
    )
    output_types = [activation, cache_type, cache_type, "bfloat16", "bfloat16"]
    kinds = {name: ONNX_TYPES[input_type(name, activation, cache_type)] for name in given}
    return one_node.open_node(
        node,
        {name: (kinds[name], rank) for name, rank in inputs},
        {
            name: ONNX_TYPES[kind]
            for name, kind in zip(names.FLASH_ATTENTION_OUTPUTS, output_types, strict=True)
            if name in outputs
        },
        threads=threads,
    )


def ort_value(array: npt.NDArray, kind: str) -> onnxruntime.OrtValue:
    """Make an OrtValue that owns a copy of the array; for kind bfloat16 of its uint16 bits.

    `ortvalue_from_numpy` would only borrow the array's memory, which may be gone by the run.
    """
    array = np.require(array, requirements="C")
    element = TensorProto.BFLOAT16 if kind == "bfloat16" else array.dtype
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, element)
    ctypes.memmove(value.data_ptr(), array.ctypes.data, array.nbytes)
    return value


def output_array(value: onnxruntime.OrtValue) -> npt.NDArray:
    """Return a copy of an OrtValue's contents; bfloat16 as uint16 bits."""
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    array = np.empty(value.shape(), dtype=np.uint16)
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array


def run(
    inputs: Mapping[str, npt.NDArray],
    attributes: Mapping[str, int | float | str],
    *,
    activation: str = "float32",
    cache_type: str = "float32",
    threads: int = 1,
) -> dict[str, npt.NDArray]:
    """Run the node and return its outputs by name; bfloat16 tensors go in and out as uint16.

    A quantised cache (int8, or uint8 for int4) has all five outputs.
    """
    outputs = names.FLASH_ATTENTION_OUTPUTS if cache_type in ("int8", "uint8") else OUTPUTS
    session = make_session(
        tuple((name, array.ndim) for name, array in inputs.items()),
        tuple(sorted(attributes.items())),
        activation,
        cache_type,
        outputs,
        threads,
    )
    binding = session.io_binding()
    values = {k: ort_value(v, input_type(k, activation, cache_type)) for k, v in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    return {
        name: output_array(value)
        for name, value in zip(outputs, binding.get_outputs(), strict=True)
    }


def run_in_place(
    feeds: Mapping[str, npt.NDArray],
    cache: Mapping[str, onnxruntime.OrtValue],
    attributes: Mapping[str, int | float | str],
    cache_type: str,
) -> list[onnxruntime.OrtValue]:
    """Run the float32 node over a shared buffer and return its outputs, the cache behind the first.

    Args:
        feeds: All inputs but the cache.
        cache: `key`, `value`, and their scales if they have any: past and present at once.
        attributes: Of the node.
        cache_type: dtype of past and present.
    """
    ranks = [(name, array.ndim) for name, array in feeds.items()]
    session = make_session(
        (*ranks, *((f"past_{name}", 4) for name in cache)), tuple(sorted(attributes.items())),
        cache_type=cache_type, outputs=("output", *(f"present_{name}" for name in cache)),
    )  # fmt: skip
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort_value(array, "float32"))
    binding.bind_output("output")
    for name, value in cache.items():
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    session.run_with_iobinding(binding)
    return binding.get_outputs()
