"""Rule `eager`: attention spelled with MatMul and Softmax becomes the placeholder.

Letters: B batch, N query heads, K key/value heads, S new tokens, T past and new, H and Hv widths.
From a layer's cached keys down, with heads on an axis of their own or merged with the batch:

    before   keys = Concat(past_key, new) [B,K,T,H] -> moves, constant factors
             MatMul(query, keys) -> constant factors, Tanh, Add, Where, moves
             Softmax over T -> moves -> MatMul(weights, values) -> moves -> [B,S,N*Hv]
    after    query [B,N,S,H], keys [B,K,T,H], values [B,K,T,Hv], mask
             -> placeholder -> [B,S,N,Hv]

Moves are Cast, Expand, Reshape, Transpose and the like. The walk only guesses what they mean; the
guess is then evaluated on random heads, and the nodes must compute what it says. Scores or
weights that anything else reads (attention outputs) are left alone, and so is whatever changes
the weights behind the Softmax.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.evaluate import Array, Cut, NotEvaluableError, make_probe
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    cast,
    find,
    producer,
    replace_uses,
    sort,
)
from kvconv.converter.rewrite.region import Layout, is_close, to_layout
from kvconv.converter.rewrite.scores import Scores, Step, UnlikeError, fold, read_factor, read_step

NAME = "eager"
_MOVES = {"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
_PROBE = make_probe(np.array([[1] * 8, [0, *[1] * 7]]), 5)


@dataclass(frozen=True, slots=True)
class _Match:
    """What the walk from a layer's keys found.

    Attributes:
        layer: Layer index.
        query: [B,N,S,H].
        key: [B,K,T,H], past and new.
        value: [B,K,T,Hv], past and new.
        scale: Product of the constant factors of query and keys.
        steps: From query . keys to the Softmax.
        outputs: The weighted values, and what moves alone make of them, in order.
    """

    layer: int
    query: gs.Variable
    key: gs.Variable
    value: gs.Variable
    scale: float
    steps: tuple[Step, ...]
    outputs: tuple[gs.Variable, ...]


def apply(editor: Editor) -> Outcome:
    """Replace the attention of every layer that has no placeholder."""
    graph = editor.graph
    nodes = find(graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    done = {node.attrs["layer_index"] for node in nodes}
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    refusals = []
    count = layer = 0
    while names.past_key(layer) in inputs:
        if layer not in done:
            try:
                match = _pattern(graph, inputs, layer)
                scores = fold(editor, match.steps, match.scale, match.query.shape[1], _PROBE)
                _rewrite(editor, match, scores, *_check(graph, match, scores))
                count += 1
            except (UnlikeError, NotEvaluableError) as error:
                refusals.append(Refusal(NAME, f"layer {layer}", str(error)))
        layer += 1
    if count:
        sort(graph)  # what was replaced must not go on reading the cache
    return Outcome(count, tuple(refusals))


def _pattern(graph: gs.Graph, inputs: dict[str, gs.Variable], layer: int) -> _Match:
    """Walk from a layer's cached keys through the Softmax to its output."""
    kept = {tensor.name for tensor in graph.outputs}
    key = _appended(inputs[names.past_key(layer)])
    value = _appended(inputs[names.past_value(layer)])

    # 1. From the keys to their product with the query.
    scale, tensor = 1.0, key
    while (node := _reader(tensor, kept - {key.name})).op != "MatMul":
        if node.op not in _MOVES:
            scale *= read_factor(node, tensor)
        tensor = node.outputs[0]
    if node.inputs[1] is not tensor:
        raise UnlikeError(f"{node.name} multiplies keys by queries, not queries by keys")
    query, factor = _query(node.inputs[0], key.dtype)

    # 2. From there to the Softmax.
    steps = []
    tensor = node.outputs[0]
    while (node := _reader(tensor, kept)).op != "Softmax":
        if node.op not in _MOVES and (step := read_step(node, tensor)) is not None:
            steps.append(step)
        tensor = node.outputs[0]

    # 3. From the weights to their product with the values.
    tensor = node.outputs[0]
    while (node := _reader(tensor, kept)).op != "MatMul":
        if node.op not in _MOVES:
            raise UnlikeError(f"{node.name} ({node.op}) changes the weights behind the Softmax")
        tensor = node.outputs[0]
    above: gs.Tensor = node.inputs[1]
    while above is not value:
        move = producer(above)
        if move is None or move.op not in _MOVES:
            raise UnlikeError(f"{node.name} multiplies the weights by other than {value.name}")
        above = move.inputs[0]

    # 4. As far as the result is only moved.
    outputs = [node.outputs[0]]
    while len(readers := outputs[-1].outputs) == 1 and readers[0].op in _MOVES:
        outputs.append(readers[0].outputs[0])
    return _Match(layer, query, key, value, scale * factor, tuple(steps), tuple(outputs))


def _appended(past: gs.Variable) -> gs.Variable:
    """Return Concat(past, new)."""
    if not _has_heads(past):
        raise UnlikeError(f"{past.name} has shape {past.shape}; heads and head_dim must be numbers")
    concats = [node for node in past.outputs if node.op == "Concat"]
    if len(concats) != 1 or concats[0].inputs[0] is not past:
        raise UnlikeError(f"{past.name} is not what one Concat(past, new) appends to")
    output: gs.Variable = concats[0].outputs[0]
    return output


def _has_heads(tensor: gs.Tensor) -> bool:
    shape = tensor.shape
    return shape is not None and len(shape) == 4 and all(isinstance(shape[i], int) for i in (1, 3))


def _reader(tensor: gs.Variable, kept: set[str]) -> gs.Node:
    """Return the one node that reads a tensor's values."""
    readers = {id(node): node for node in tensor.outputs if node.op != "Shape"}
    if tensor.name in kept:
        raise UnlikeError(f"{tensor.name} is a graph output")
    if len(readers) != 1:
        raise UnlikeError(f"{tensor.name} is read by {len(readers)} nodes, not by one")
    return next(iter(readers.values()))


def _query(operand: gs.Tensor, dtype: np.dtype[Any]) -> tuple[gs.Variable, float]:
    """Walk up from an operand to the query [B,N,S,H] in the cache's type; returns its factor."""
    tensor, factor = operand, 1.0
    while (node := producer(tensor)) is not None:
        if node.op in {"Mul", "Div"}:
            above = next((t for t in node.inputs if isinstance(t, gs.Variable)), tensor)
            try:
                factor *= read_factor(node, above)
            except UnlikeError:
                break
            tensor = above
        elif node.op in _MOVES and not (_has_heads(tensor) and tensor.dtype == dtype):
            tensor = node.inputs[0]
        else:
            break
    if not _has_heads(tensor) or tensor.dtype != dtype:
        raise UnlikeError(
            f"no query of shape [batch, heads, tokens, width] lies above {operand.name}"
        )
    return tensor, factor


def _check(graph: gs.Graph, match: _Match, scores: Scores) -> tuple[gs.Variable, Layout]:
    """Evaluate a match; returns the last output that holds the formula's numbers.

    Raises:
        UnlikeError: None does.
    """
    given = [match.query, match.key, match.value]
    new, total = _PROBE.position_ids.shape[1], _PROBE.attention_mask.shape[1]
    random = np.random.default_rng(match.layer)
    heads = [
        random.standard_normal((2, tensor.shape[1], tokens, tensor.shape[3])).astype(tensor.dtype)
        for tensor, tokens in zip(given, (new, total, total), strict=True)
    ]
    feeds = {tensor.name: values for tensor, values in zip(given, heads, strict=True)}
    outputs = Cut(graph, match.outputs, given).run(_PROBE.feeds() | feeds)
    if match.query.shape[1] % match.key.shape[1]:
        raise UnlikeError(
            f"{match.query.shape[1]} query heads are no multiple of {match.key.shape[1]} key heads"
        )
    mask = None if scores.mask is None else _mask_values(graph, scores.mask)
    expected = _attention(scores, mask, *heads)
    layouts: tuple[Layout, ...] = ("BSD", "BSNH", "BNSH")
    for tensor, values in reversed(list(zip(match.outputs, outputs, strict=True))):
        for layout in layouts:
            if is_close(values, to_layout(expected, layout).astype(values.dtype)):
                tensor.dtype = values.dtype
                return tensor, layout
    raise UnlikeError(
        "its nodes do not compute softmax(softcap(scale * query . keys) + mask) . values "
        f"with scale {scores.scale:.6g} and softcap {scores.softcap:.6g}"
    )


def _mask_values(graph: gs.Graph, mask: gs.Tensor) -> Array:
    (values,) = Cut(graph, [mask]).run(_PROBE.feeds())
    return np.where(values, 0.0, -np.inf) if values.dtype == bool else values.astype(np.float64)


def _attention(scores: Scores, mask: Array | None, query: Array, key: Array, value: Array) -> Array:
    """Return the formula's result [B,S,N,Hv] in float64."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    key, value = (np.repeat(array, groups, axis=1) for array in (key, value))
    numbers = query @ key.swapaxes(-1, -2) * scores.scale
    if scores.softcap:
        numbers = scores.softcap * np.tanh(numbers / scores.softcap)
    if mask is not None:
        numbers = numbers + mask
    weights = np.exp(numbers - numbers.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    result: Array = (weights @ value).transpose(0, 2, 1, 3)
    return result


def _rewrite(
    editor: Editor, match: _Match, scores: Scores, old: gs.Variable, layout: Layout
) -> None:
    heads, head_dim = match.query.shape[1], match.query.shape[3]
    kv_heads, width = match.value.shape[1], match.value.shape[3]
    dtype = match.query.dtype
    split = gs.Variable(
        editor.fresh("attention"), dtype, [names.DIM_BATCH, names.DIM_SEQUENCE, heads, width]
    )
    mask = gs.Variable.empty() if scores.mask is None else scores.mask
    editor.add_node(
        names.TRACE_ATTENTION,
        [match.query, match.key, match.value, mask],
        [split],
        {
            "layer_index": match.layer,
            "num_heads": heads,
            "kv_num_heads": kv_heads,
            "head_dim": head_dim,
            "value_head_dim": width,
            "scale": scores.scale,
            "softcap": scores.softcap,
        },
        domain=names.TRACE_DOMAIN,
    )
    new = split
    if layout == "BSD":
        shape = [names.DIM_BATCH, names.DIM_SEQUENCE, heads * width]
        new = editor.add(
            "Reshape", [split, editor.ints(0, 0, heads * width)], dtype=dtype, shape=shape
        )
    elif layout == "BNSH":
        new = editor.add("Transpose", [split], {"perm": [0, 2, 1, 3]}, dtype=dtype)
    replace_uses(old, cast(editor, new, old.dtype))
