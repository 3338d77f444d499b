"""Turns a loaded decoder into an ONNX graph with an explicit KV cache.

The model runs with an attention function and a mask function of ours, so that each attention call
becomes one placeholder node (`kvconv.trace::Attention`) which still says what the call said: scale,
softcap, window, sinks and mask. Everything else becomes plain ONNX operators, and so does attention
where a model computes it by itself: rule `eager` makes placeholders of that. The weights are shared
by reference with the PyTorch model; nothing is copied here.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvconv import names
from kvconv.converter.alibi_table import computed_alibi
from kvconv.converter.attention import ATTENTION_NAME, spelled_out_attention
from kvconv.converter.causal_table import computed_tables
from kvconv.converter.complex_numbers import RealArithmetic
from kvconv.converter.decoder_spec import CacheShape, DecoderSpec
from kvconv.converter.experts import EXPERTS_NAME
from kvconv.converter.mla import LatentLayer, absorbed, latent_layers
from kvconv.converter.quiet import quiet
from kvconv.converter.rope import original_frequencies
from kvconv.converter.temperature import tuned_by_position
from kvconv.errors import ExportError, UnsupportedModelError, root_cause

# Traced at sizes that no model fixes by accident and that differ from one another.
_BATCH, _SEQUENCE, _PAST = 2, 3, 5
_ENDLESS = 2**31
"""More tokens than any model takes; what torch.export does not limit is larger."""


def trace(model: PreTrainedModel, spec: DecoderSpec, *, opset: int) -> ir.Model:
    """Trace a decoder into an ONNX graph with explicit past and present.

    The graph's inputs and outputs have the names and dimensions of `kvconv.names`; each attention
    is one placeholder node whose key and value inputs are the concatenation of past and new, or
    spelled with MatMul and Softmax where the model has attention code of its own.

    Args:
        model: In eval mode, on the CPU. Its attention implementation is replaced during the call.
        spec: Facts about the same model.
        opset: Version of the default ONNX domain, 18 to 23.

    Returns:
        A model whose initializers share memory with the PyTorch weights.

    Raises:
        UnsupportedModelError: The model calls the attention interface for some layers only, or its
            attention has a feature that the placeholder cannot express.
        ExportError: PyTorch could not trace the model.
    """
    inputs = _example_inputs(spec)
    wrapper = _ExplicitCache(model, spec).eval()
    with (
        quiet(),
        _our_functions(model) as is_ours,
        absorbed(model),
        original_frequencies(model),
        tuned_by_position(model),
        torch.no_grad(),
    ):
        try:
            program = torch.onnx.export(
                wrapper,
                tuple(inputs.values()),
                dynamo=True,
                dynamic_shapes=_dynamic_shapes(inputs),
                input_names=_input_names(inputs),
                output_names=[names.LOGITS, *_cache_names("present", len(spec.cache_shapes))],
                opset_version=opset,
                optimize=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            refusal = _refusal(error, spec)
            if refusal is not None:
                raise refusal from error
            raise ExportError(
                f"PyTorch cannot trace {spec.architecture}: {root_cause(error)} "
                f"Show the whole story with --debug; a newer transformers may help."
            ) from error
    if program is None:
        raise ExportError(f"PyTorch returned no graph for {spec.architecture}.")
    _check_width(program, spec)
    _name_dimensions(program.model.graph)
    if is_ours:
        _check_placeholders(program.model.graph, spec)
    return program.model


class _ExplicitCache(torch.nn.Module):
    """The decoder as a function of its cache: past tensors in, logits and present tensors out."""

    def __init__(self, model: PreTrainedModel, spec: DecoderSpec) -> None:
        super().__init__()
        self.model = model
        self.cache_argument = spec.cache_argument
        latent = latent_layers(model)
        self.layer_classes = [
            LatentLayer if index in latent else DynamicLayer
            for index in range(len(spec.cache_shapes))
        ]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None,
        past_key_values: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Run the decoder on new tokens; every layer keeps the whole past, windowed ones too."""
        cache = DynamicCache()
        cache.layers = [
            _filled_layer(layer_class(), key, value)
            for layer_class, (key, value) in zip(self.layer_classes, past_key_values, strict=True)
        ]
        arguments: dict[str, Any] = {self.cache_argument: cache}
        if position_ids is not None:
            arguments["position_ids"] = position_ids
        with RealArithmetic():
            output = self.model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **arguments
            )
        return output.logits, [(layer.keys, layer.values) for layer in cache.layers]


def _filled_layer(layer: DynamicLayer, key: torch.Tensor, value: torch.Tensor) -> DynamicLayer:
    """Give a cache layer its past, without the concatenation `update` would trace."""
    layer.lazy_initialization(key, value)
    layer.keys, layer.values = key, value
    return layer


def _example_inputs(spec: DecoderSpec) -> dict[str, Any]:
    """Return inputs of the traced sizes: one padded slot, so that no mask is trivially full."""
    total = _PAST + _SEQUENCE
    attention_mask = torch.ones((_BATCH, total), dtype=torch.int64)
    attention_mask[0, 0] = 0
    inputs: dict[str, Any] = {
        "input_ids": torch.arange(_BATCH * _SEQUENCE).reshape(_BATCH, _SEQUENCE),
        "attention_mask": attention_mask,
        "position_ids": None,
    }
    if spec.has_position_ids:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        inputs["position_ids"] = position_ids[:, _PAST:].contiguous()
    dtype = getattr(torch, spec.dtype)
    inputs["past_key_values"] = [_example_past(shape, dtype) for shape in spec.cache_shapes]
    return inputs


def _example_past(shape: CacheShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    leading = (_BATCH, shape.num_key_value_heads, _PAST)
    return (
        torch.zeros((*leading, shape.key_head_dim), dtype=dtype),
        torch.zeros((*leading, shape.value_head_dim), dtype=dtype),
    )


def _dynamic_shapes(inputs: dict[str, Any]) -> dict[str, Any]:
    """Name the dynamic dimensions; all layers share one symbol for the past.

    The mask's width is past + new, which torch.export's named dimensions cannot say: it is left to
    the tracer and named afterwards.
    """
    batch = torch.export.Dim(names.DIM_BATCH)
    tokens = {0: batch, 1: torch.export.Dim(names.DIM_SEQUENCE)}
    past = {0: batch, 2: torch.export.Dim(names.DIM_PAST)}
    return {
        "input_ids": tokens,
        "attention_mask": {0: batch, 1: torch.export.Dim.DYNAMIC},
        "position_ids": None if inputs["position_ids"] is None else tokens,
        "past_key_values": [(past, past)] * len(inputs["past_key_values"]),
    }


def _input_names(inputs: dict[str, Any]) -> list[str]:
    plain = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    return [*plain, *_cache_names("past", len(inputs["past_key_values"]))]


def _cache_names(side: str, num_layers: int) -> list[str]:
    key, value = (
        (names.past_key, names.past_value)
        if side == "past"
        else (names.present_key, names.present_value)
    )
    return [name for index in range(num_layers) for name in (key(index), value(index))]


def _name_dimensions(graph: ir.Graph) -> None:
    """Name dimensions as `kvconv.names` does; sums of past and new are total_sequence_length.

    PyTorch keeps the names given to it only where the model takes every argument.
    """
    shapes = {value.name: tuple(value.shape or ()) for value in graph.inputs}
    batch, new = map(str, shapes[names.INPUT_IDS])
    past, total = str(shapes[names.past_key(0)][2]), str(shapes[names.ATTENTION_MASK][1])
    called: dict[str, str] = {
        batch: names.DIM_BATCH,
        new: names.DIM_SEQUENCE,
        past: names.DIM_PAST,
        **dict.fromkeys((total, f"{past} + {new}", f"{new} + {past}"), names.DIM_TOTAL),
    }
    produced = (value for node in graph for value in node.outputs)
    for value in (*graph.inputs, *produced):
        if value.shape is not None:
            value.shape = ir.Shape(called.get(str(dim), dim) for dim in value.shape)


def _check_placeholders(graph: ir.Graph, spec: DecoderSpec) -> None:
    layers = sorted(
        node.attributes["layer_index"].as_int()
        for node in graph
        if node.domain == names.TRACE_DOMAIN and node.op_type == names.TRACE_ATTENTION
    )
    if layers != list(range(len(spec.cache_shapes))):
        why = (
            "only in some"
            if len(layers) < len(spec.cache_shapes)
            else "more than once per cache layer, or several layers share one"
        )
        raise UnsupportedModelError(
            f"{spec.architecture} calls transformers' attention interface {len(layers)} times for "
            f"{len(spec.cache_shapes)} layers: {why}. kvconv needs exactly one call per layer; "
            f"choose a model whose class calls it for every layer, or never.",
            model_type=spec.model_type,
        )


@contextlib.contextmanager
def _our_functions(model: PreTrainedModel) -> Iterator[bool]:
    """Switch a model to our attention and experts functions and back.

    Yields:
        False if its class does not know the attention interface. Then it attends as it always
        does, but spells attention and causal masks out.
    """
    before, experts_before = model.config._attn_implementation, model.get_experts_implementation()
    model.set_attn_implementation(ATTENTION_NAME)
    model.set_experts_implementation(EXPERTS_NAME)  # does nothing to a model without experts
    try:
        # A class that does not know the interface only logs that, and keeps what it had.
        if model.config._attn_implementation == ATTENTION_NAME:
            yield True
        else:
            with spelled_out_attention(), computed_tables(model), computed_alibi(model):
                yield False
    finally:
        model.set_attn_implementation(before)
        model.set_experts_implementation(experts_before)


def _refusal(error: BaseException, spec: DecoderSpec) -> UnsupportedModelError | None:
    """Return the refusal behind the exporter's own errors, if it is one: ours, or a branch."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, UnsupportedModelError):
        if isinstance(cause, GuardOnDataDependentSymNode):
            return _branches(spec, "values that are known only when it runs")
        if violated := re.match(r"Constraints violated \((.+?)\)", str(cause)):
            return _branches(spec, violated.group(1))
        cause = cause.__cause__
    return cause


def _check_width(program: torch.onnx.ONNXProgram, spec: DecoderSpec) -> None:
    """Refuse a model that branches on the mask's width; torch.export freezes that unsaid."""
    mask_shape = program.model.graph.inputs[1].shape
    assert mask_shape is not None
    assert program.exported_program is not None
    for symbol, tokens in program.exported_program.range_constraints.items():
        if str(symbol) == str(mask_shape[1]) and (tokens.lower > 1 or tokens.upper < _ENDLESS):
            raise _branches(spec, f"{names.DIM_TOTAL} ({tokens.lower} to {tokens.upper})")


def _branches(spec: DecoderSpec, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The Python code of {spec.architecture} branches on {what}, and a graph would hold the "
        f"branch of the traced run only. kvconv cannot convert such a model.",
        model_type=spec.model_type,
    )
