"""What the weights of an export take, from shapes alone.

Float ones are counted exactly. Which form an int4 weight gets depends on what it loses
(`kvconv.converter.quantization`), so that is told from where it stands: a GGUF file's own blocks of
4 bits lose nothing, everything else loses more than is allowed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf as gguf_files
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from kvconv.cache_layout import ELEMENT_BYTES
from kvconv.converter.gguf_reading import fast_reading
from kvconv.converter.linear_sizes import LinearSize, linear_sizes
from kvconv.converter.nbits_layout import GROUP_ROWS
from kvconv.converter.options import ExportOptions
from kvconv.converter.weights import INLINE_BYTES
from kvconv.manifest import ActivationDtype, QuantizedDtype

_EXACT_TYPES = frozenset({Type.Q4_0, Type.Q4_1, Type.Q4_K})
"""Blocks of 32 with 4 bits, a scale and a minimum: what int4 holds without loss."""
_FINE_BLOCK_SIZE = 16
_SCALE_BYTES = 2


def weight_bytes(
    model: PreTrainedModel,
    order: Sequence[str],
    *,
    dtype: ActivationDtype,
    weights: QuantizedDtype | None,
    gguf: Path | None,
) -> int:
    """Return the bytes of an export's weights, each stored once.

    Args:
        model: With or without weights.
        order: Names of the linear weights in the order in which a run computes with them.
        dtype: Of the weights that stay float.
        weights: Of the linear ones; None is `dtype`.
        gguf: The file that the model comes from, if it is one.
    """
    float_bytes = ELEMENT_BYTES[dtype]
    parameters = {id(weight): weight for weight in model.parameters()}
    total = sum(weight.numel() for weight in parameters.values()) * float_bytes
    if weights is None:
        return total
    types = {} if gguf is None or weights == "int8" else _gguf_types(model, gguf)
    linears = {id(linear.parameter): linear for linear in linear_sizes(model)}
    embedding = model.get_input_embeddings().weight
    rows, width = embedding.shape
    linears.setdefault(
        id(embedding), LinearSize("", embedding, None, out_features=rows, in_features=width)
    )
    groups = _groups(list(linears.values()), order)
    for linear in linears.values():
        size = linear.parameter.numel() * float_bytes
        if linear.is_router or size // linear.count <= INLINE_BYTES:
            continue
        group = groups.get(linear.name, [linear.name])
        loses = any(types.get(name) not in _EXACT_TYPES for name in group)
        is_sensitive = linear.is_head or _is_before_attention(linear, order)
        bits, block_size = _form(weights, loses=loses, is_sensitive=is_sensitive)
        total += linear.count * _quantized_bytes(linear, bits, block_size) - size
    return total


def _groups(linears: Sequence[LinearSize], order: Sequence[str]) -> dict[str, list[str]]:
    """Return which weights are packed into one (`kvconv.converter.packed`), by each one's name.

    Those of one module that are as wide as its first are taken to read the same numbers; what a
    module computes last reads what the others made.
    """
    by_name = {linear.name: linear for linear in linears}
    modules: dict[str, list[str]] = {}
    for name in order:
        modules.setdefault(_parent(name), []).append(name)
    groups: dict[str, list[str]] = {}
    for names in modules.values():
        first = by_name[names[0]]
        packed = [name for name in names[:-1] if by_name[name].in_features == first.in_features]
        groups |= dict.fromkeys(packed, packed)
    return groups


def _is_before_attention(linear: LinearSize, order: Sequence[str]) -> bool:
    """Tell whether keys, queries or values are computed with a weight, and not what follows."""
    parent = _parent(linear.name)
    siblings = [name for name in order if _parent(name) == parent]
    last = parent.rpartition(".")[2]
    return "att" in last and linear.name in siblings[:-1]


def _parent(name: str) -> str:
    """Return the path of the module around the layer that has a parameter `path.layer.weight`."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _form(weights: QuantizedDtype, *, loses: bool, is_sensitive: bool) -> tuple[int, int]:
    """Return bits and block size; see `kvconv.converter.quantization`."""
    block_size = ExportOptions(weights=weights).chosen_block_size
    if weights == "int8":
        return 8, block_size
    if not loses:
        return 4, block_size
    return (8, block_size) if is_sensitive else (4, _FINE_BLOCK_SIZE)


def _quantized_bytes(linear: LinearSize, bits: int, block_size: int) -> int:
    """Return what one matrix takes: integers, scales, and zero points where it has 4 bits."""
    rows = -(-linear.out_features // GROUP_ROWS) * GROUP_ROWS
    block_bytes = block_size * bits // 8 + _SCALE_BYTES * (2 if bits == 4 else 1)
    return rows * -(-linear.in_features // block_size) * block_bytes


def _gguf_types(model: PreTrainedModel, path: Path) -> Mapping[str, Type]:
    """Return how a GGUF file stores each parameter, from its header."""
    with fast_reading(remember=True):
        names = get_gguf_hf_weights_map(model, TensorProcessor(config={}))
        tensors = gguf_files.GGUFReader(str(path)).tensors
    return {names[tensor.name]: tensor.tensor_type for tensor in tensors if tensor.name in names}
