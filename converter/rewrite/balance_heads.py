"""Rule `balance_heads`: query and key norms share their channels' energy evenly.

    before   HeadRMSNormalization(packed, query_weight, key_weight [H]) -> FlashAttention
    after    HeadRMSNormalization(packed, query_weight / s, key_weight * s) -> FlashAttention

A score is a sum over channels of query times key, so any s > 0 leaves it as it is, if the two
channels that the rotary embedding turns into each other have one s. A quantised cache rounds the
key: an error of channel c weighs on the score as much as the query is large there. With

    s = (mean(query_weight^2) / mean(key_weight^2)) ^ (1/4)

over the channels of a pair, both sides have the same energy, and errors weigh on all channels
alike; no s makes their sum smaller. Gemma 3 has query weights that differ by a factor of ten.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.evaluate import Cut, NotEvaluableError
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    find,
    get_operand,
    is_external,
    operand_heads,
    producer,
)

NAME = "balance_heads"
_SMALLEST_ENERGY = 1e-6
"""Of a channel, in parts of the largest: a weight of 0 has no inverse."""
_BALANCED = 1e-3
"""Factors as close to 1 as that change nothing worth a new constant."""
Weights = npt.NDArray[np.float64]


def apply(editor: Editor) -> Outcome:
    """Balance the norms in front of every FlashAttention node whose cache will be quantised."""
    if editor.cache_dtype not in ("int8", "int4"):
        return Outcome(0)
    count, refusals = 0, []
    for node, norm in _pattern(editor.graph):
        found = _check(editor.graph, node, norm)
        if isinstance(found, str):
            refusals.append(Refusal(NAME, norm.name, found))
        elif _rewrite(editor, node, norm, *found):
            count += 1
    return Outcome(count, tuple(refusals))


def _pattern(graph: gs.Graph) -> Iterator[tuple[gs.Node, gs.Node]]:
    """Yield each attention node that reads normed heads, and the norm."""
    for node in find(graph, names.OP_NAME, names.OP_DOMAIN):
        norm = producer(get_operand(node, "query"))
        is_norm = norm is not None and norm.op == names.HEAD_RMS_NORMALIZATION
        if is_norm and get_operand(node, "key") is None:
            yield node, norm


def _check(graph: gs.Graph, node: gs.Node, norm: gs.Node) -> tuple[Weights, Weights] | str:
    """Return the weights of query and key, or why they must stay as they are."""
    others = [reader.name for reader in norm.outputs[0].outputs if reader is not node]
    if others or any(norm.outputs[0] is tensor for tensor in graph.outputs):
        return f"{', '.join(others) or 'the graph'} reads the normed heads as well"
    weights = []
    for tensor in norm.inputs[1:3]:
        try:
            values = _values(graph, tensor)
        except NotEvaluableError as error:
            return f"{tensor.name} is no constant: {error}"
        if not np.isfinite(values).all() or not values.any():
            return f"{tensor.name} is zero everywhere, or not finite"
        weights.append(values)
    query, key = weights
    return query, key


def _values(graph: gs.Graph, tensor: gs.Tensor) -> Weights:
    """Return a constant, or what constants are computed into: Gemma's 1 + weight.

    Raises:
        NotEvaluableError: It depends on more than that.
    """
    if isinstance(tensor, gs.Constant):
        if is_external(tensor):
            raise NotEvaluableError("it lies in the weights file")
        return np.asarray(tensor.values, np.float64)
    return np.asarray(Cut(graph, [tensor]).run({})[0], np.float64)


def _rewrite(editor: Editor, node: gs.Node, norm: gs.Node, query: Weights, key: Weights) -> bool:
    """Give a norm balanced weights; False if they are balanced as they are."""
    pairs = _pairs(node)
    energy = [_mean(weights**2, pairs) for weights in (query, key)]
    energy = [np.maximum(each, _SMALLEST_ENERGY * each.max()) for each in energy]
    exponent = np.log(energy[0] / energy[1]) / 4
    factor = np.exp(exponent - exponent.mean())
    if np.abs(factor - 1).max() < _BALANCED:
        return False
    for index, values in ((1, query / factor), (2, key * factor)):
        dtype = norm.inputs[index].dtype
        norm.inputs[index] = editor.constant(values.astype(dtype))
    return True


def _pairs(node: gs.Node) -> npt.NDArray[np.int64]:
    """Return for each channel of a head a number that only those of its pair have."""
    head_dim = operand_heads(node)["query"][1]
    pairs = np.arange(head_dim)
    if get_operand(node, "cos") is not None:
        rotated = node.attrs.get("rotary_dim", 0) or head_dim
        first = np.arange(rotated // 2)
        interleaved = node.attrs.get("rotary_interleaved", 0)
        pairs[:rotated] = np.repeat(first, 2) if interleaved else np.tile(first, 2)
    return pairs


def _mean(values: Weights, pairs: npt.NDArray[np.int64]) -> Weights:
    """Return for each channel the mean over its pair."""
    sums = np.bincount(pairs, values)
    result: Weights = (sums / np.maximum(np.bincount(pairs), 1))[pairs]
    return result
