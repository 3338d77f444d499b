"""Runs a small part of a graph on probe values, to learn what it computes.

Masks and rotary embeddings are recognised by what they say, not by which nodes they are made of.
A part is cut from the tensor of interest back to the graph's inputs; a cut that reaches cached
values, a constant in the weights file or the token ids is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

from kvconv import names
from kvconv.converter.rewrite.graph import is_external, is_past, upstream

Array = npt.NDArray[Any]


class NotEvaluableError(Exception):
    """A cut cannot be run; the message is the reason, and it becomes a refusal."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The integer inputs of one run.

    Attributes:
        attention_mask: [batch_size, total_sequence_length] int64.
        position_ids: [batch_size, sequence_length] int64.
    """

    attention_mask: Array
    position_ids: Array

    @property
    def past(self) -> int:
        """Tokens in the cache before the run."""
        return self.attention_mask.shape[1] - self.position_ids.shape[1]

    def feeds(self) -> dict[str, Array]:
        """Return the graph inputs by name; of input_ids a cut reads the shape only."""
        return {
            names.INPUT_IDS: np.zeros_like(self.position_ids),
            names.ATTENTION_MASK: self.attention_mask,
            names.POSITION_IDS: self.position_ids,
        }


def make_probe(attention_mask: Array, sequence_length: int) -> Probe:
    """Return a probe with the position ids that a mask implies, as Hugging Face computes them."""
    positions = np.clip(np.cumsum(attention_mask, axis=1) - 1, 0, None)
    total = attention_mask.shape[1]
    return Probe(attention_mask.astype(np.int64), positions[:, total - sequence_length :])


class Cut:
    """The part of a graph between some tensors and the inputs, ready to run.

    Args:
        graph: Where the tensors live; not changed.
        outputs: Tensors to compute.
        given: Tensors whose values the caller feeds; constants in the weights file may be among
            them.
        positions: Whether the part may read position_ids, not only their shape.

    Raises:
        NotEvaluableError: The part needs token ids, weights, cached values, another attention
            node, or position ids that it may not read.
    """

    def __init__(
        self,
        graph: gs.Graph,
        outputs: Sequence[gs.Tensor],
        given: Sequence[gs.Tensor] = (),
        *,
        positions: bool = True,
    ) -> None:
        nodes = upstream(outputs, given)
        read = {tensor.name: tensor for node in nodes for tensor in node.inputs}
        _require_evaluable(nodes, {tensor.name for tensor in given}, positions=positions)
        wanted = {tensor.name for tensor in [*given, *graph.inputs]}
        inputs = [tensor for name, tensor in read.items() if name in wanted]
        weights = [tensor for tensor in inputs if is_external(tensor)]
        computed = {tensor.name for node in nodes for tensor in node.outputs}
        if not all(tensor.name in computed for tensor in outputs):
            raise NotEvaluableError("it is an input or a constant")
        cut = gs.Graph(
            nodes,
            [tensor for tensor in inputs if not is_external(tensor)],
            list(outputs),
            opset=graph.opset,
            import_domains=graph.import_domains,
        )
        cut.ir_version = graph.ir_version
        model = gs.export_onnx(cut, do_type_check=False)
        del model.graph.value_info[:]
        _make_inputs(model.graph, weights)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._inputs = [tensor.name for tensor in inputs]
        self._outputs = [tensor.name for tensor in outputs]
        try:
            self._session = ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise NotEvaluableError(f"ONNX Runtime refuses it: {_first_line(error)}") from error

    def run(self, values: Mapping[str, Array]) -> list[Array]:
        """Compute the outputs.

        Args:
            values: Feeds by name; those that the cut does not read are ignored.

        Raises:
            NotEvaluableError: ONNX Runtime reports an error, for example about a shape.
        """
        for name in self._inputs:
            if name not in values:
                raise NotEvaluableError(f"it depends on the input {name}")
        feeds = {name: values[name] for name in self._inputs}
        try:
            return list(self._session.run(self._outputs, feeds))
        except Exception as error:
            raise NotEvaluableError(f"it fails on a probe: {_first_line(error)}") from error


def _require_evaluable(nodes: Sequence[gs.Node], given: set[str], *, positions: bool) -> None:
    """Refuse a part whose inputs no probe can stand for; see `Cut`."""
    for tensor in (tensor for node in nodes for tensor in node.inputs):
        if is_external(tensor) and tensor.name not in given:
            raise NotEvaluableError(f"it depends on the weight {tensor.name}")
        if is_past(tensor):
            raise NotEvaluableError(f"it depends on {tensor.name}")
    # No set of probes stands for all token ids: a function of them is known nowhere else.
    values = {tensor.name for node in nodes if node.op != "Shape" for tensor in node.inputs}
    if names.INPUT_IDS in values:
        raise NotEvaluableError("it depends on the token ids")
    if names.POSITION_IDS in values and not positions:
        raise NotEvaluableError("it depends on the position ids")
    for node in nodes:
        if node.domain in (names.OP_DOMAIN, names.TRACE_DOMAIN):
            raise NotEvaluableError(f"it depends on the attention node {node.name}")


def _make_inputs(graph: onnx.GraphProto, weights: Sequence[gs.Tensor]) -> None:
    """Turn constants into inputs, which onnx-graphsurgeon has no way to say."""
    entries = {entry.name: entry for entry in graph.initializer}
    for entry in [entries[weight.name] for weight in weights]:
        graph.input.append(
            onnx.helper.make_tensor_value_info(entry.name, entry.data_type, entry.dims)
        )
        graph.initializer.remove(entry)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
