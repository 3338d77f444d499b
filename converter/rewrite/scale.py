"""Rule `scale`: a constant factor of the query goes into FlashAttention's scale.

    before   Mul(query, 0.25) -> FlashAttention(scale=1)
    after    query -> FlashAttention(scale=0.25)

Rotation inside the op keeps lengths, so a factor may stand before or behind it.
"""

import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Editor, Outcome, find, get_operand, producer, set_operand
from kvconv.converter.rewrite.match import number

NAME = "scale"


def apply(editor: Editor) -> Outcome:
    """Take in every factor of a query that holds one number."""
    count = 0
    for node in find(editor.graph, names.OP_NAME, names.OP_DOMAIN):
        query = get_operand(node, "query")
        if query is None or get_operand(node, "key") is None or not node.attrs["scale"]:
            continue  # packed, so a factor would be the key's and value's as well; or the default
        while (match := _pattern(query)) is not None:
            query, factor = match
            node.attrs["scale"] *= factor
            set_operand(node, "query", query)
            count += 1
    return Outcome(count)


def _pattern(query: gs.Tensor) -> tuple[gs.Tensor, float] | None:
    """Return what a constant factor multiplies, and the factor."""
    node = producer(query)
    if node is None or node.op not in {"Mul", "Div"}:
        return None
    for tensor, constant in (node.inputs, reversed(node.inputs)):
        factor = number(constant)
        if factor and tensor.shape == query.shape and tensor.shape is not None:
            if node.op == "Mul":
                return tensor, factor
            if constant is node.inputs[1]:
                return tensor, 1 / factor
    return None
