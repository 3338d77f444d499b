"""Rule `gated`: act(gate) * up becomes one kvconv::GatedActivation node.

    before   Split(packed [.., 2*I]) -> gate, up      Mul(act(gate), up)
    after    GatedActivation(packed) -> [.., I]

What stands between gate and Mul is evaluated on numbers and must be one of the op's activations,
however it is spelled. The Split disappears with it: nothing copies gate and up apart.
"""

import math
from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.evaluate import Array, Cut, NotEvaluableError
from kvconv.converter.rewrite.graph import Editor, Outcome, find, replace_uses
from kvconv.converter.rewrite.match import columns, only_reader, other_operand

NAME = "gated"
_PROBE = np.linspace(-9, 9, 181)
"""What the gate holds in a probe."""


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def _gelu_tanh(x: Array) -> Array:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
}
"""Value of the op's attribute -> what it computes; gelu and gelu_tanh differ by 4.7e-4 at most."""


def apply(editor: Editor) -> Outcome:
    """Replace every gate whose activation the op has."""
    count = 0
    for split in find(editor.graph, "Split"):
        product = _pattern(split)
        if product is None:
            continue
        gate, up = split.outputs
        activation = _check(editor.graph, gate, other_operand(product, up))
        if activation is not None:
            _rewrite(editor, split.inputs[0], product.outputs[0], activation)
            count += 1
    return Outcome(count)


def _pattern(split: gs.Node) -> gs.Node | None:
    """Return the Mul that reads up, where a Split halves the last axis into gate and up."""
    halves = [columns(output) for output in split.outputs]
    if len(halves) != 2 or halves[0] is None or 2 * halves[0].end != halves[0].source.shape[-1]:
        return None
    return only_reader(split.outputs[1], "Mul")


def _check(graph: gs.Graph, gate: gs.Variable, operand: gs.Tensor | None) -> str | None:
    """Return which activation of the gate an operand is: the nearest, where that is near enough."""
    if not isinstance(operand, gs.Variable) or gate.shape is None or len(gate.shape) < 2:
        return None
    column = _PROBE.astype(gate.dtype).reshape(-1, 1)
    shape = (*[1] * (len(gate.shape) - 2), len(column), gate.shape[-1])
    try:
        (actual,) = Cut(graph, [operand], [gate]).run({gate.name: np.broadcast_to(column, shape)})
    except NotEvaluableError:
        return None
    if actual.shape != shape:
        return None
    exact = column.astype(np.float64)
    errors = {name: _error(actual, function(exact)) for name, function in _ACTIVATIONS.items()}
    nearest = min(errors, key=errors.__getitem__)  # in float16 gelu and gelu_tanh are both near
    return nearest if errors[nearest] <= (1e-3 if gate.dtype == np.float16 else 1e-5) else None


def _error(actual: Array, expected: Array) -> float:
    """Return the largest error: absolute below 1, relative above; NaN and infinity are infinite."""
    errors = np.abs(actual - expected) / (1 + np.abs(expected))
    return float(np.where(np.isfinite(errors), errors, np.inf).max())


def _rewrite(editor: Editor, packed: gs.Variable, old: gs.Variable, activation: str) -> None:
    new = gs.Variable(editor.fresh(names.GATED_ACTIVATION), packed.dtype, old.shape)
    editor.add_node(
        names.GATED_ACTIVATION, [packed], [new], {"activation": activation}, domain=names.OP_DOMAIN
    )
    replace_uses(old, new)
