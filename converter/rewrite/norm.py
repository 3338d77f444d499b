"""Rule `norm`: root mean square normalisation becomes one RMSNormalization node.

    before   ReduceMean(x * x, last axis) + epsilon -> Sqrt -> Reciprocal -> * x -> * weight
    after    RMSNormalization(x, weight)

x: [.., width], weight: [width]. A half-precision model computes the former in float32, between
Casts that the node makes unnecessary: it computes in float32 as well. Where the weight is float32
too (Gemma's 1 + weight) the Casts stay. A norm of heads that were transposed, [B,N,S,H], moves in
front of its Transpose, which later rules then remove.

The node is ONNX's from opset 23 on; graphs of older ones stay as they are.
"""

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    find,
    producer,
    replace_uses,
)
from kvconv.converter.rewrite.match import number, only_reader, other_operand

NAME = "norm"
_OPSET = 23


@dataclass(frozen=True, slots=True)
class _Match:
    """One norm.

    Attributes:
        x: [.., width].
        weight: [width], of x's type.
        epsilon: Added to the mean square.
        output: x's shape and type.
    """

    x: gs.Variable
    weight: gs.Tensor
    epsilon: float
    output: gs.Variable


def apply(editor: Editor) -> Outcome:
    """Replace every norm that has a weight."""
    if editor.graph.opset < _OPSET:
        return Outcome(0)
    matches = [match for node in find(editor.graph, "ReduceMean") if (match := _pattern(node))]
    for match in matches:
        _rewrite(editor, match)
    return Outcome(len(matches))


def _pattern(mean: gs.Node) -> _Match | None:
    """Walk from the mean of squares down to the product with the weight."""
    x = _squared(mean.inputs[0])
    if x is None or not _over_last_axis(mean, x):
        return None
    add = only_reader(mean.outputs[0], "Add")
    epsilon = None if add is None else number(other_operand(add, mean.outputs[0]))
    root = None if add is None else only_reader(add.outputs[0], "Sqrt")
    inverse = None if root is None else only_reader(root.outputs[0], "Reciprocal")
    product = None if inverse is None else only_reader(inverse.outputs[0], "Mul")
    if epsilon is None or inverse is None or product is None:
        return None
    if other_operand(product, inverse.outputs[0]) is not x:
        return None
    normal = product.outputs[0]
    narrowed, widened = only_reader(normal, "Cast"), producer(x)
    if narrowed is not None and widened is not None and widened.op == "Cast":
        source = widened.inputs[0]
        match = _weighted(source, narrowed.outputs[0], epsilon)
        if match is not None and source.dtype == match.output.dtype:
            return match
    return _weighted(x, normal, epsilon)


def _weighted(x: gs.Variable, normal: gs.Variable, epsilon: float) -> _Match | None:
    """Return the norm that ends with a product of `normal` and a weight of x's type and width."""
    scaled = only_reader(normal, "Mul")
    if scaled is None or x.shape is None:
        return None
    weight, output = other_operand(scaled, normal), scaled.outputs[0]
    shape = None if weight is None else weight.shape
    if weight is None or shape is None or list(shape) != [x.shape[-1]]:
        return None
    if not isinstance(x.shape[-1], int) or not weight.dtype == x.dtype == output.dtype:
        return None
    return _Match(x, weight, epsilon, output)


def _rewrite(editor: Editor, match: _Match) -> None:
    x, dtype = match.x, match.output.dtype
    attrs = {"axis": -1, "epsilon": match.epsilon}
    transpose = producer(x)
    if transpose is None or not _moves_heads(transpose):
        new = editor.add(
            "RMSNormalization", [x, match.weight], attrs, dtype=dtype, shape=match.output.shape
        )
    else:
        above = transpose.inputs[0]
        normal = editor.add(
            "RMSNormalization", [above, match.weight], attrs, dtype=dtype, shape=above.shape
        )
        new = editor.add(
            "Transpose", [normal], transpose.attrs, dtype=dtype, shape=match.output.shape
        )
    replace_uses(match.output, new)


def _moves_heads(node: gs.Node) -> bool:
    """Tell whether a Transpose leaves the last axis in its place."""
    perm = node.attrs.get("perm")  # None: all axes in reverse order
    return node.op == "Transpose" and perm is not None and perm[-1] == len(perm) - 1


def _squared(tensor: gs.Tensor) -> gs.Variable | None:
    """Return x where the tensor is x * x."""
    node = producer(tensor)
    if node is None or node.op not in {"Pow", "Mul"}:
        return None
    x, other = node.inputs
    is_square = number(other) == 2 if node.op == "Pow" else other is x
    return x if is_square and isinstance(x, gs.Variable) else None


def _over_last_axis(mean: gs.Node, x: gs.Variable) -> bool:
    axes = mean.attrs.get("axes")
    if len(mean.inputs) > 1 and isinstance(mean.inputs[1], gs.Constant):
        axes = mean.inputs[1].values.tolist()
    last = [] if x.shape is None else [len(x.shape) - 1]
    return mean.attrs.get("keepdims", 1) == 1 and axes is not None and list(axes) in ([-1], last)
