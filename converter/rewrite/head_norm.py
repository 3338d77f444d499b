"""Rule `head_norm`: FlashAttention reads a packed projection whose heads are normed in one node.

Letters: B batch, S sequence, N query heads, K key/value heads, H and Hv widths.

    before   Split(packed [B,S,N*H + K*H + K*Hv]) -> query, key, value
             query -> [B,S,N,H] -> RMSNormalization(weight [H]) -> [B,S,N*H] -> attention
             key   -> [B,S,K,H] -> RMSNormalization(weight [H]) -> [B,S,K*H] -> attention
             value ----------------------------------------------------------> attention
    after    kvconv::HeadRMSNormalization(packed, two weights) -> attention
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    find,
    get_operand,
    may_pack,
    operand_heads,
    producer,
    set_operand,
)
from kvconv.converter.rewrite.match import columns, packed_source

NAME = "head_norm"


@dataclass(frozen=True, slots=True)
class _Normed:
    """An operand made of normed heads.

    Attributes:
        part: What the heads were cut from, [B,S,heads*H].
        weight: [H].
        epsilon: Added to the mean square.
    """

    part: gs.Tensor
    weight: gs.Tensor
    epsilon: float


def apply(editor: Editor) -> Outcome:
    """Replace the norms of query and key of every attention node that has both."""
    count = 0
    for node in find(editor.graph, names.OP_NAME, names.OP_DOMAIN):
        match = _pattern(node) if may_pack(editor, node) else None
        if match is not None:
            _rewrite(editor, node, *match)
            count += 1
    return Outcome(count)


def _pattern(node: gs.Node) -> tuple[gs.Variable, _Normed, _Normed] | None:
    """Return the packed projection, and what norms query and key."""
    value = get_operand(node, "value")
    sizes = operand_heads(node)
    query, key = (_normed(get_operand(node, name), *sizes[name]) for name in ("query", "key"))
    if value is None or query is None or key is None or query.epsilon != key.epsilon:
        return None
    packed = packed_source([columns(tensor) for tensor in (query.part, key.part, value)])
    if packed is None or packed.dtype not in (np.float32, np.float16):
        return None
    if not packed.dtype == query.weight.dtype == key.weight.dtype:
        return None
    return packed, query, key


def _normed(operand: gs.Tensor | None, heads: int, head_dim: int) -> _Normed | None:
    """Walk from an operand [B,S,heads*H] through Reshape, norm and Reshape."""
    merge = None if operand is None else producer(operand)
    norm = None if merge is None or merge.op != "Reshape" else producer(merge.inputs[0])
    if norm is None or norm.op != "RMSNormalization" or norm.attrs.get("axis", -1) not in (-1, 3):
        return None
    split = producer(norm.inputs[0])
    shape = norm.inputs[0].shape
    if split is None or split.op != "Reshape" or shape is None:
        return None
    part, weight = split.inputs[0], norm.inputs[1]
    # A Reshape keeps the order of numbers, so sizes say all.
    if part.shape is None or list(shape) != [*part.shape[:2], heads, head_dim]:
        return None
    if list(weight.shape or ()) != [head_dim]:
        return None
    return _Normed(part, weight, norm.attrs.get("epsilon", 1e-5))


def _rewrite(
    editor: Editor, node: gs.Node, packed: gs.Variable, query: _Normed, key: _Normed
) -> None:
    sizes = operand_heads(node)
    output = gs.Variable(editor.fresh(names.HEAD_RMS_NORMALIZATION), packed.dtype, packed.shape)
    editor.add_node(
        names.HEAD_RMS_NORMALIZATION,
        [packed, query.weight, key.weight],
        [output],
        {
            "num_heads": sizes["query"][0],
            "kv_num_heads": sizes["key"][0],
            "epsilon": query.epsilon,
        },
        domain=names.OP_DOMAIN,
    )
    set_operand(node, "query", output)
    set_operand(node, "key", None)
    set_operand(node, "value", None)
