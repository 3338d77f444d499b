"""Rule `packed_qkv`: attention takes queries, keys and values as one projection gives them.

Letters: B batch, S new tokens, N query heads, K key/value heads, H and Hv widths.

    before   Split(packed [B,S,N*H + K*H + K*Hv]) -> query, key, value -> attention
    after    packed, no key, no value -> attention

The parts may be cut by Slices as well, in a model whose own projection is one. Both
kvconv::FlashAttention and com.microsoft::GroupQueryAttention have these as their first inputs.
"""

import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Editor, Outcome, find, may_pack, optional_input
from kvconv.converter.rewrite.match import columns, packed_source

NAME = "packed_qkv"
_OPS = (
    (names.OP_NAME, names.OP_DOMAIN),
    (names.GROUP_QUERY_ATTENTION, names.ORT_DOMAIN),
)


def apply(editor: Editor) -> Outcome:
    """Pack the operands of every attention node that reads all columns of one tensor in order."""
    count = 0
    for node in (node for op in _OPS for node in find(editor.graph, *op)):
        packed = _pattern(node) if may_pack(editor, node) else None
        if packed is not None:
            for index, tensor in enumerate((packed, gs.Variable.empty(), gs.Variable.empty())):
                node.inputs[index] = tensor
            count += 1
    return Outcome(count)


def _pattern(node: gs.Node) -> gs.Variable | None:
    """Return the tensor whose columns are query, key and value, and nothing else."""
    operands = [optional_input(node, index) for index in range(3)]
    if any(operand is None for operand in operands):
        return None  # packed already
    return packed_source([columns(operand) for operand in operands if operand is not None])
