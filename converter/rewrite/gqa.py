"""Rule `gqa`: FlashAttention becomes ONNX Runtime's com.microsoft::GroupQueryAttention.

Letters: B batch, N query heads, S new tokens, T past and new, H width of a head, R rotated width.

    before   FlashAttention of any form that the rules before this one leave
    after    query, key, value [B,S,heads*H], past_key, past_value, seqlens_k [B] int32,
             total_sequence_length int32 -> GroupQueryAttention -> the same three outputs

1. The node knows no mask but causal and window, and each row's length: T ones in attention_mask.
   It reads padding on the left and holes as a shorter row, so callers must not give any.
2. What is not causal and window is added to the scores: a mask that stayed a bias (with causal 0),
   and ALiBi, slope * (slot - query's slot).
3. Rotation goes into the node where its kernel takes the sizes; it rotates by slot, so position_ids
   is no longer an input of the graph. Elsewhere rotation becomes ordinary nodes, and a refusal says
   why.

`causal` is spelled wherever there is a window. ONNX Runtime before 1.30 does not know it and
refuses the model: some of those versions see one token more than the window.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    cast,
    find,
    get_operand,
    operand_heads,
    sort,
)
from kvconv.converter.rewrite.rotation import rotate, tables_by_position

NAME = "gqa"
_UNDERSTOOD = frozenset({
    "query", "key", "value", "past_key", "past_value", "attention_mask", "cos", "sin",
    "attention_bias", "alibi_slopes", "head_sink",
    "num_heads", "kv_num_heads", "scale", "softcap", "window_size", "causal", "rotary_interleaved",
    "rotary_dim",
})  # fmt: skip
"""Inputs and attributes of FlashAttention that this rule can say in the other node's words."""
_INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink",
)  # fmt: skip
# Head widths, head widths with rotation, and pairs rotated must be multiples of these.
_HEAD_DIM, _ROTATED_HEAD_DIM, _PAIRS = 8, 16, 8


@dataclass
class _Shared:
    """What the nodes of all layers have in common, made when the first one asks."""

    lengths: dict[str, gs.Variable] = field(default_factory=dict)
    tables: dict[object, tuple[gs.Variable, gs.Variable] | str] = field(default_factory=dict)
    biases: dict[object, gs.Variable] = field(default_factory=dict)


def apply(editor: Editor) -> Outcome:
    """Replace every FlashAttention node that GroupQueryAttention can stand for exactly."""
    graph = editor.graph
    shared = _Shared()
    refusals, outside = [], []
    nodes = find(graph, names.OP_NAME, names.OP_DOMAIN)
    for node in nodes:
        if (reason := _check(node)) is not None:
            refusals.append(Refusal(NAME, node.name, reason))
        elif (reason := _rewrite(editor, node, shared)) is not None:
            outside.append(Refusal(NAME, node.name, f"rotation stays outside: {reason}"))
    if nodes:
        sort(graph)
        graph.inputs = [t for t in graph.inputs if t.name != names.POSITION_IDS or t.outputs]
    return Outcome(len(nodes) - len(refusals), (*refusals, *outside))


def _check(node: gs.Node) -> str | None:
    """Return why the node cannot be expressed, or None."""
    operands = _operands(node)
    given = {name for name, tensor in operands.items() if tensor is not None}
    if unknown := sorted((given | node.attrs.keys()) - _UNDERSTOOD):
        return f"GroupQueryAttention has no {', '.join(unknown)}"
    (_, head_dim), (_, value_head_dim) = (operand_heads(node)[name] for name in ("key", "value"))
    if head_dim != value_head_dim:
        return (
            f"keys are {head_dim} wide and values {value_head_dim}; GroupQueryAttention takes one "
            f"width"
        )
    if head_dim % _HEAD_DIM:
        return f"head_dim is {head_dim}; GroupQueryAttention takes multiples of {_HEAD_DIM}"
    if node.attrs["window_size"] and not node.attrs["causal"]:
        return "it has a window and is not causal; GroupQueryAttention takes causal windows only"
    query, past = operands["query"], operands["past_key"]
    if query.dtype != past.dtype:
        return f"activations are {query.dtype} and the cache {past.dtype}; they must be equal"
    return None


def _rewrite(editor: Editor, node: gs.Node, shared: _Shared) -> str | None:
    """Replace a node; returns why its rotation stayed outside, if it has one that did."""
    operands = _operands(node)
    dtype, attrs = operands["query"].dtype, node.attrs
    sink, window = operands["head_sink"], attrs["window_size"]
    new_attrs = {name: attrs[name] for name in ("num_heads", "kv_num_heads", "scale")}
    if attrs["softcap"]:
        new_attrs["softcap"] = attrs["softcap"]
    if window:
        new_attrs["local_window_size"] = window  # the query's own slot counts, as ours does
    if window or not attrs["causal"]:
        new_attrs["causal"] = attrs["causal"]
    inputs = {name: operands[name] for name in _INPUTS[:5]}
    inputs |= _lengths(editor, shared)
    inputs["attention_bias"] = _bias(editor, node, shared)
    inputs["head_sink"] = None if sink is None else cast(editor, sink, dtype)
    reason = None
    if operands["cos"] is not None:
        tables = _tables(editor, node, shared)
        if isinstance(tables, str):
            reason = tables
            inputs |= _rotated(editor, node)
        else:
            inputs["cos_cache"], inputs["sin_cache"] = tables
            new_attrs |= {"do_rotary": 1, "rotary_interleaved": attrs["rotary_interleaved"]}
    outputs = list(node.outputs)
    node.inputs.clear()
    node.outputs.clear()
    ordered = [inputs.get(name) for name in _INPUTS]
    while ordered[-1] is None:
        ordered.pop()
    editor.add_node(
        names.GROUP_QUERY_ATTENTION,
        [gs.Variable.empty() if tensor is None else tensor for tensor in ordered],
        outputs,
        new_attrs,
        domain=names.ORT_DOMAIN,
    )
    return reason


def _lengths(editor: Editor, shared: _Shared) -> dict[str, gs.Variable]:
    """Return seqlens_k [B], each row's past and new tokens less one, and T, both int32."""
    if not shared.lengths:
        mask = editor.input(names.ATTENTION_MASK)
        ones = editor.add(
            "ReduceSum", [mask, editor.ints(1)], {"keepdims": 0},
            dtype=np.int64, shape=[names.DIM_BATCH],
        )  # fmt: skip
        one = editor.constant(np.array(1, np.int64))
        last = editor.add("Sub", [ones, one], dtype=np.int64, shape=[names.DIM_BATCH])
        shared.lengths["seqlens_k"] = cast(editor, last, np.int32)
        total = _scalar(editor, editor.dimension(names.ATTENTION_MASK, 1))
        shared.lengths["total_sequence_length"] = cast(editor, total, np.int32)
    return shared.lengths


def _bias(editor: Editor, node: gs.Node, shared: _Shared) -> gs.Variable | None:
    """Return what is added to the scores, with all of S and T as the node wants it, or None."""
    operands = _operands(node)
    bias, slopes = operands["attention_bias"], operands["alibi_slopes"]
    key = tuple(None if tensor is None else tensor.name for tensor in (bias, slopes))
    if key == (None, None):
        return None
    if key not in shared.biases:
        dtype = operands["query"].dtype
        terms = []
        if slopes is not None:
            terms.append(cast(editor, _alibi(editor, slopes), dtype))
        if bias is not None:
            new, total = _new_and_total(editor)
            shape = [editor.ints(1, 1), new, total]
            full = editor.add("Concat", shape, {"axis": 0}, dtype=np.int64, shape=[4])
            terms.append(editor.add("Expand", [bias, full], dtype=dtype))
        shared.biases[key] = terms[0] if len(terms) == 1 else editor.add("Add", terms, dtype=dtype)
    return shared.biases[key]


def _alibi(editor: Editor, slopes: gs.Tensor) -> gs.Variable:
    """Return slope * (slot - query's slot), [1,N,S,T] float32."""
    new, total = (_scalar(editor, size) for size in _new_and_total(editor))
    zero, one = (editor.constant(np.array(value, np.int64)) for value in (0, 1))
    past = editor.add("Sub", [total, new], dtype=np.int64, shape=[])
    slots = editor.add("Range", [zero, total, one], dtype=np.int64)
    queries = editor.add("Range", [past, total, one], dtype=np.int64)
    queries = editor.add("Unsqueeze", [queries, editor.ints(1)], dtype=np.int64)
    distance = editor.add("Sub", [slots, queries], dtype=np.int64)
    slopes = editor.add("Unsqueeze", [slopes, editor.ints(0, 2, 3)], dtype=np.float32)
    return editor.add("Mul", [cast(editor, distance, np.float32), slopes], dtype=np.float32)


def _tables(
    editor: Editor, node: gs.Node, shared: _Shared
) -> tuple[gs.Variable, gs.Variable] | str:
    """Return cos_cache and sin_cache [max_sequence_length, R/2], or why rotation stays outside."""
    head_dim, rotary_dim = _rotary_sizes(node)
    if head_dim % _ROTATED_HEAD_DIM or rotary_dim // 2 % _PAIRS:
        return (
            f"head_dim is {head_dim} and {rotary_dim} of it are rotated; GroupQueryAttention "
            f"rotates multiples of {2 * _PAIRS} in heads of a multiple of {_ROTATED_HEAD_DIM}"
        )
    operands = _operands(node)
    cos, sin = operands["cos"], operands["sin"]
    key = (cos.name, sin.name)
    if key not in shared.tables:
        dtype = np.dtype(operands["query"].dtype)
        shared.tables[key] = tables_by_position(editor, cos, sin, dtype=dtype)
    return shared.tables[key]


def _rotated(editor: Editor, node: gs.Node) -> dict[str, gs.Variable]:
    """Return query and key of a node, rotated by ordinary nodes."""
    head_dim, rotary_dim = _rotary_sizes(node)
    operands = _operands(node)
    return {
        name: rotate(
            editor,
            operands[name],
            operands["cos"],
            operands["sin"],
            heads=operand_heads(node)[name][0],
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            interleaved=bool(node.attrs["rotary_interleaved"]),
        )
        for name in ("query", "key")
    }


def _operands(node: gs.Node) -> dict[str, Any]:
    """Return every input of a FlashAttention node by name, None where it is left out."""
    return {name: get_operand(node, name) for name in names.FLASH_ATTENTION_INPUTS}


def _rotary_sizes(node: gs.Node) -> tuple[int, int]:
    """Return head_dim and how much of it is rotated."""
    head_dim: int = operand_heads(node)["query"][1]
    return head_dim, node.attrs["rotary_dim"] or head_dim


def _new_and_total(editor: Editor) -> tuple[gs.Variable, gs.Variable]:
    """Return S and T, each int64 [1]."""
    return editor.dimension(names.INPUT_IDS, 1), editor.dimension(names.ATTENTION_MASK, 1)


def _scalar(editor: Editor, tensor: gs.Variable) -> gs.Variable:
    return editor.add("Squeeze", [tensor], dtype=tensor.dtype, shape=[])
