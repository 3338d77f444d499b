"""Compiles the CUDA kernels that a model needs."""

from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import find, get_operand, operand_heads
from kvconv.custom_ops.triton.compile import require_triton
from kvconv.custom_ops.triton.pack import write_pack
from kvconv.custom_ops.triton.variants import (
    Attention,
    Feature,
    list_variants,
    parse_gpus,
)
from kvconv.custom_ops.triton.worker import compile_variants
from kvconv.errors import ExportError
from kvconv.manifest import Kernels

_OF_OPERAND = {
    "cos": Feature.ROTARY,
    "attention_mask": Feature.MASK,
    "attention_bias": Feature.BIAS,
    "alibi_slopes": Feature.ALIBI,
    "head_sink": Feature.SINK,
}


class TritonKernels:
    """Compiles kvconv's Triton kernels; needs no GPU.

    Args:
        gpus: What to compile for, such as `sm_90`; empty for all that are known.
        processes: How many compile at once; None for as many as there are CPUs.

    Raises:
        ExportError: A GPU is not known.
        MissingDependencyError: Triton is not installed.
    """

    def __init__(self, gpus: tuple[str, ...] = (), *, processes: int | None = None) -> None:
        self.gpus = parse_gpus(gpus)
        require_triton()  # exporting takes minutes; nobody should wait for a refusal
        self.processes = processes

    def build(self, model_path: Path) -> tuple[bytes, Kernels]:
        """Return the content of the file of kernels, and what the manifest says of it.

        Args:
            model_path: The rewritten model; its weights are not read.

        Raises:
            ExportError: A node is none that there are kernels for, or a kernel does not compile.
        """
        variants = list_variants(find_attentions(model_path), self.gpus)
        content = write_pack(compile_variants(variants, processes=self.processes))
        return content, Kernels(self.gpus, len(variants))


def find_attentions(model_path: Path) -> list[Attention]:
    """Return the kinds of FlashAttention nodes of a model, each once.

    Args:
        model_path: A rewritten model; its weights are not read.

    Raises:
        ExportError: There are none, or one is none that there are kernels for.
    """
    graph = gs.import_onnx(onnx.load(model_path, load_external_data=False))
    attentions: dict[Attention, None] = {}
    for node in find(graph, names.OP_NAME, names.OP_DOMAIN):
        attention = _attention(node)
        attention.check(node.name)
        attentions[attention] = None
    if not attentions:
        raise ExportError(
            f"{model_path.name} has no {names.OP_NAME} nodes, which CUDA kernels are for. Export "
            f"with --attention flash."
        )
    return list(attentions)


def _attention(node: gs.Node) -> Attention:
    heads = operand_heads(node)
    attributes = node.attrs
    features = Feature(0)
    for name, feature in _OF_OPERAND.items():
        if get_operand(node, name) is not None:
            features |= feature
    rotary = Feature.ROTARY in features
    for is_on, feature in (
        (rotary and attributes.get("rotary_interleaved", 0), Feature.ROTARY_INTERLEAVED),
        (attributes.get("softcap", 0.0) > 0, Feature.SOFTCAP),
        (attributes.get("window_size", 0) > 0, Feature.WINDOW),
        (attributes.get("cache_mode", "auto") == "ring", Feature.RING),
        (attributes.get("causal", 1), Feature.CAUSAL),
    ):
        if is_on:
            features |= feature
    head_dim = heads["key"][1]
    return Attention(
        activation_type=_element_type(node, "query"),
        cache_type=_element_type(node, "past_key"),
        head_dim=head_dim,
        value_head_dim=heads["value"][1],
        group=heads["query"][0] // heads["key"][0],
        rotary_dim=(attributes.get("rotary_dim", 0) or head_dim) if rotary else 0,
        features=features,
    )


def _element_type(node: gs.Node, name: str) -> int:
    tensor = get_operand(node, name)
    assert tensor is not None  # every node has these two
    dtype = tensor.dtype
    return int(dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(dtype))
