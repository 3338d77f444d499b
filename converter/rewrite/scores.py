"""What the nodes between `query . keys` and a Softmax do to the scores, put into one formula.

    softcap(scale * query . keys) + mask,    softcap(x) = softcap * tanh(x / softcap)

The steps are read one node at a time, on the way down, and folded in that order. Whatever is
added, ALiBi and masks alike, ends up in one operand with four axes; a mask that only says which
scores count stays bool. Letters: B batch, N query heads, S new tokens, T past and new.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from kvconv.converter.rewrite.evaluate import Array, Cut, Probe
from kvconv.converter.rewrite.graph import Editor, as_bias, is_external
from kvconv.converter.rewrite.match import number

_LOW = -1e4
"""Scores that a mask sets to this or less count for nothing; float16's lowest is -65504."""


class UnlikeError(Exception):
    """Nodes are no attention that can be put into words; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one node does to the scores.

    Attributes:
        op: `Mul` (by a constant), `Tanh`, `Add` or `Where`.
        number: The factor of a Mul.
        operand: What an Add adds; the condition of a Where.
        keeps: Whether a Where keeps the scores where its condition holds, or drops them there.
    """

    op: str
    number: float = 1.0
    operand: gs.Tensor | None = None
    keeps: bool = True


@dataclass(frozen=True, slots=True)
class Scores:
    """The formula.

    Attributes:
        scale: Factor of query . keys.
        softcap: Bound of what that gives; 0 for none.
        mask: [B or 1, N or 1, S or 1, T] bool (True = attend) or float (added); None for none.
    """

    scale: float
    softcap: float
    mask: gs.Tensor | None


def read_step(node: gs.Node, scores: gs.Tensor) -> Step | None:
    """Return what a node does to the scores; None where scores that count stay as they are.

    Raises:
        UnlikeError: It does something else.
    """
    if node.op == "Tanh":
        return Step("Tanh")
    if node.op == "Add":
        return Step("Add", operand=_other(node, scores))
    if node.op == "Max" and (number(_other(node, scores)) or 0.0) <= _LOW:
        return None
    if node.op == "Where" and node.inputs[0] is not scores:
        keeps = node.inputs[1] is scores
        low = number(node.inputs[2 if keeps else 1])
        if low is None or low > _LOW:
            raise UnlikeError(f"{node.name} makes scores {low}, which does not mask them")
        return Step("Where", operand=node.inputs[0], keeps=keeps)
    return Step("Mul", read_factor(node, scores))


def read_factor(node: gs.Node, tensor: gs.Tensor) -> float:
    """Return the positive constant by which a node multiplies a tensor.

    Raises:
        UnlikeError: The node does something else.
    """
    factor = number(_other(node, tensor)) if node.op in {"Mul", "Div"} else None
    if factor is None or factor <= 0 or (node.op == "Div" and node.inputs[1] is tensor):
        raise UnlikeError(
            f"{node.name} ({node.op}) neither masks scores nor multiplies by a positive constant"
        )
    return factor if node.op == "Mul" else 1 / factor


def fold(editor: Editor, steps: Iterable[Step], scale: float, heads: int, probe: Probe) -> Scores:
    """Put steps into one formula; adds nodes that compute the mask.

    Args:
        editor: Of the graph.
        steps: In order, from query . keys to the Softmax.
        scale: Factor of query and keys before they are multiplied.
        heads: N; tells [B*N,S,T] from what is broadcast.
        probe: To evaluate operands with; its batch is B.

    Raises:
        UnlikeError: The formula cannot say it.
        NotEvaluableError: An operand cannot be evaluated.
    """
    softcap = 0.0
    mask: gs.Tensor | None = None
    for step in steps:
        if step.op == "Mul":
            if softcap:
                softcap *= step.number
            else:
                scale *= step.number
            mask = _times(editor, mask, step.number)
        elif step.op == "Tanh":
            if softcap or mask is not None:
                raise UnlikeError("a Tanh bounds scores that are masked or bounded already")
            softcap = 1.0
        else:
            assert step.operand is not None
            operand = _with_four_axes(editor, step.operand, heads, probe)
            add = _add if step.op == "Add" else _keep
            mask = add(editor, mask, operand, step)
    return Scores(scale * (softcap or 1.0), softcap, mask)


def _times(editor: Editor, mask: gs.Tensor | None, factor: float) -> gs.Tensor | None:
    if mask is None or mask.dtype == np.dtype(bool):
        return mask
    operand = editor.constant(np.array(factor, mask.dtype))
    return editor.add("Mul", [mask, operand], dtype=mask.dtype)


def _add(editor: Editor, mask: gs.Tensor | None, operand: gs.Tensor, _: Step) -> gs.Tensor:
    if mask is None:
        return operand
    above = as_bias(editor, mask, operand.dtype)
    return editor.add("Add", [above, operand], dtype=operand.dtype)


def _keep(editor: Editor, mask: gs.Tensor | None, condition: gs.Tensor, step: Step) -> gs.Tensor:
    if not step.keeps:
        condition = editor.add("Not", [condition], dtype=bool, shape=condition.shape)
    if mask is None:
        return condition
    if mask.dtype == np.dtype(bool):
        return editor.add("And", [mask, condition], dtype=bool)
    # Of the sum's type, which may be wider than what the model fills in for: no score is as low.
    low = editor.constant(np.array(np.finfo(mask.dtype).min, mask.dtype))
    return editor.add("Where", [condition, mask, low], dtype=mask.dtype)


def _with_four_axes(editor: Editor, operand: gs.Tensor, heads: int, probe: Probe) -> gs.Tensor:
    values = _evaluate(editor.graph, operand, probe)
    dtype = operand.dtype = values.dtype  # which traced graphs do not always say
    if values.ndim == 3 and values.shape[0] == len(probe.attention_mask) * heads:
        rest = editor.add("Shape", [operand], {"start": 1}, dtype=np.int64, shape=[2])
        parts = [editor.ints(-1, heads), rest]
        shape = editor.add("Concat", parts, {"axis": 0}, dtype=np.int64, shape=[4])
        return editor.add("Reshape", [operand, shape], dtype=dtype)
    if values.ndim < 4:
        axes = editor.ints(*range(4 - values.ndim))
        return editor.add("Unsqueeze", [operand, axes], dtype=dtype)
    return operand


def _evaluate(graph: gs.Graph, tensor: gs.Tensor, probe: Probe) -> Array:
    if is_external(tensor):
        raise UnlikeError(f"scores are masked by or added to the weight {tensor.name}")
    if isinstance(tensor, gs.Constant):
        values: Array = tensor.values
        return values
    return Cut(graph, [tensor]).run(probe.feeds())[0]


def _other(node: gs.Node, tensor: gs.Tensor) -> gs.Tensor:
    """Return the other operand of a node of two."""
    others = [operand for operand in node.inputs if operand is not tensor]
    if len(node.inputs) != 2 or len(others) != 1:
        raise UnlikeError(f"{node.name} ({node.op}) is not known to be a part of attention")
    return others[0]
