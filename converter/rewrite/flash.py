"""Rule `flash`: the traced placeholder becomes kvconv::FlashAttention.

Letters: B batch, N query heads, K key/value heads, S new tokens, T past and new, H and Hv widths.

    before   query [B,N,S,H]   Concat(past_key, key) [B,K,T,H]   Concat(past_value, value)   mask
             -> placeholder -> [B,S,N,Hv]
    after    query [B,S,N*H]   key [B,S,K*H]   value [B,S,K*Hv]   past_key   past_value   bias
             -> FlashAttention -> output [B,S,N*Hv], present_key, present_value

The Concats go: the op appends to the cache itself. This rule is right for every placeholder it
accepts and clever about none: the mask stays as attention_bias (causal 0), rotary embedding stays
in the graph, and heads are moved by Transpose and Reshape. The rules after it improve on that.
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    as_bias,
    cast,
    find,
    optional_input,
    producer,
    replace_uses,
    set_operand,
)
from kvconv.converter.rewrite.region import flatten_heads

NAME = "flash"
PRESENT_LENGTH = "present_sequence_length"
"""Dimension 2 of present.*: the past's capacity, or past and new together."""


@dataclass(frozen=True, slots=True)
class _Cache:
    """One appended cache: `Concat(past, new)`, the key or value operand of a placeholder."""

    past: gs.Variable
    new: gs.Variable
    present: gs.Variable


def apply(editor: Editor) -> Outcome:
    """Replace every placeholder whose cache and mask the op can take over."""
    graph = editor.graph
    refusals = []
    biases: dict[str, gs.Tensor] = {}
    nodes = find(graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    for node in nodes:
        layer = node.attrs["layer_index"]
        key = _pattern(graph, node, 1, names.past_key(layer), names.present_key(layer))
        value = _pattern(graph, node, 2, names.past_value(layer), names.present_value(layer))
        reason = key if isinstance(key, str) else value if isinstance(value, str) else _check(node)
        if isinstance(key, str) or isinstance(value, str) or reason is not None:
            refusals.append(Refusal(NAME, node.name, str(reason)))
            continue
        _rewrite(editor, node, key, value, biases)
    return Outcome(len(nodes) - len(refusals), tuple(refusals))


def _pattern(
    graph: gs.Graph, node: gs.Node, index: int, past_name: str, present_name: str
) -> _Cache | str:
    """Return the cache behind an operand, or why it is not one that the op can append to."""
    operand = node.inputs[index]
    concat = producer(operand)
    if concat is None or concat.op != "Concat" or len(concat.inputs) != 2:
        return f"{operand.name} is not Concat(past, new)"
    if concat.attrs["axis"] not in (2, -2):
        return f"{operand.name} is concatenated along axis {concat.attrs['axis']}, not 2"
    past, new = concat.inputs
    if past.name != past_name:
        return f"{operand.name} appends to {past.name}, not to {past_name}"
    if operand.name != present_name or not any(tensor is operand for tensor in graph.outputs):
        return f"{operand.name} is not the graph output {present_name}"
    others = [reader.name for reader in operand.outputs if reader is not node]
    if others:
        return f"{operand.name} is read by other nodes: {', '.join(others)}"
    if past.shape is None or not all(isinstance(past.shape[i], int) for i in (1, 3)):
        return f"{past.name} has shape {past.shape}; heads and head_dim must be numbers"
    return _Cache(past, new, operand)


def _check(node: gs.Node) -> str | None:
    """Return why the op cannot stand for a placeholder, or None."""
    heads, kv_heads = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    if kv_heads == 0 or heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} key/value heads"
    mask = optional_input(node, 3)
    if mask is None:
        return "it has no mask operand; tracing must spell the mask out"
    if mask.shape is not None and len(mask.shape) != 4:
        return f"its mask {mask.name} has {len(mask.shape)} dimensions, not 4"
    return None


def _rewrite(
    editor: Editor, node: gs.Node, key: _Cache, value: _Cache, biases: dict[str, gs.Tensor]
) -> None:
    query, mask, sink = node.inputs[0], node.inputs[3], optional_input(node, 4)
    attrs = node.attrs
    dtype = query.dtype
    heads, width = attrs["num_heads"], attrs["value_head_dim"]
    if mask.name not in biases:
        biases[mask.name] = as_bias(editor, mask, dtype)
    output = gs.Variable(
        editor.fresh("attention"), dtype, [names.DIM_BATCH, names.DIM_SEQUENCE, heads * width]
    )
    operands = {
        "query": flatten_heads(editor, query, "BNSH", heads * attrs["head_dim"]),
        "key": _new_heads(editor, key),
        "value": _new_heads(editor, value),
        "past_key": key.past,
        "past_value": value.past,
        "attention_mask": _all_slots(editor),
        "attention_bias": biases[mask.name],
        "head_sink": None if sink is None else cast(editor, sink, np.float32),
    }
    old_output = node.outputs[0]
    key.present.inputs.clear()
    value.present.inputs.clear()
    node.inputs.clear()
    node.outputs.clear()
    for cache in (key, value):
        heads_stored, head_dim = cache.past.shape[1], cache.past.shape[3]
        cache.present.shape = [names.DIM_BATCH, heads_stored, PRESENT_LENGTH, head_dim]
    flash = editor.add_node(
        names.OP_NAME,
        [],
        [output, key.present, value.present],
        {
            "num_heads": heads,
            "kv_num_heads": attrs["kv_num_heads"],
            "scale": attrs["scale"],
            "softcap": attrs["softcap"],
            "window_size": 0,
            "causal": 0,
        },
        domain=names.OP_DOMAIN,
    )
    for name, operand in operands.items():
        set_operand(flash, name, operand)
    split = editor.add(
        "Reshape", [output, editor.ints(0, 0, heads, width)],
        dtype=dtype, shape=[names.DIM_BATCH, names.DIM_SEQUENCE, heads, width],
    )  # fmt: skip
    replace_uses(old_output, split)


def _new_heads(editor: Editor, cache: _Cache) -> gs.Variable:
    return flatten_heads(editor, cache.new, "BNSH", cache.past.shape[1] * cache.past.shape[3])


def _all_slots(editor: Editor) -> gs.Variable:
    """Return ones as wide as attention_mask: padding is in the bias, and only there."""
    shape = editor.add("Shape", [editor.input(names.ATTENTION_MASK)], dtype=np.int64, shape=[2])
    ones = gs.Constant(editor.fresh("one"), np.ones(1, np.int64))
    return editor.add(
        "ConstantOfShape", [shape], {"value": ones},
        dtype=np.int64, shape=[names.DIM_BATCH, names.DIM_TOTAL],
    )  # fmt: skip
