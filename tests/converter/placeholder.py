"""Evaluates the attention placeholder in numpy, so that traced graphs can be run and compared."""

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from kvconv import names


class Attention(OpRun):
    """`kvconv.trace::Attention` as its docstring defines it, in float64."""

    op_domain = names.TRACE_DOMAIN

    def _run(self, query, key, value, mask=None, head_sink=None, **attributes):
        group = attributes["num_heads"] // attributes["kv_num_heads"]
        q, k, v = (array.astype(np.float64) for array in (query, key, value))
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = q @ k.swapaxes(-1, -2) * attributes["scale"]
        if softcap := attributes["softcap"]:
            scores = np.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
        peak = np.maximum(scores.max(axis=-1, keepdims=True), np.finfo(np.float32).min)
        sink = 0.0
        if head_sink is not None:
            sinks = head_sink.astype(np.float64)[None, :, None, None]
            peak = np.maximum(peak, sinks)
            sink = np.exp(sinks - peak)
        weights = np.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True) + sink
        weights /= np.where(total == 0, 1, total)
        return ((weights @ v).transpose(0, 2, 1, 3).astype(query.dtype),)


def evaluate(path, feeds):
    """Run a traced graph on numpy inputs; returns its outputs by name."""
    session = ReferenceEvaluator(str(path), new_ops=[Attention])
    return dict(zip(session.output_names, session.run(None, feeds), strict=True))


def placeholders(path):
    """Return the attention placeholders of a stored graph, by layer index."""
    graph = onnx.load(path, load_external_data=False).graph
    nodes = [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} | {"inputs": node.input}
        for node in graph.node
        if node.domain == names.TRACE_DOMAIN
    ]
    return sorted(nodes, key=lambda attributes: attributes["layer_index"])
