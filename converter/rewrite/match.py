"""Small questions that patterns ask about the nodes around a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from kvconv.converter.rewrite.graph import is_external, producer


@dataclass(frozen=True, slots=True)
class Columns:
    """Part of a tensor's last axis.

    Attributes:
        source: The whole tensor.
        start: First column.
        end: Behind the last column.
    """

    source: gs.Variable
    start: int
    end: int


def number(tensor: gs.Tensor | None) -> float | None:
    """Return the value of a constant that holds one number."""
    if not isinstance(tensor, gs.Constant) or is_external(tensor) or tensor.values.size != 1:
        return None
    return float(tensor.values.item())


def other_operand(node: gs.Node, tensor: gs.Tensor) -> gs.Tensor | None:
    """Return the other operand of a node of two; None where both are the tensor."""
    return next((operand for operand in node.inputs if operand is not tensor), None)


def only_reader(tensor: gs.Variable, op: str) -> gs.Node | None:
    """Return the one node that reads a tensor, if it is of that operator."""
    readers = {id(node): node for node in tensor.outputs}
    node = next(iter(readers.values()), None)
    return node if node is not None and len(readers) == 1 and node.op == op else None


def columns(tensor: gs.Tensor) -> Columns | None:
    """Return the columns that a Split or a Slice cut from a tensor of known width."""
    node = producer(tensor)
    if node is None or node.op not in {"Split", "Slice"}:
        return None
    source = node.inputs[0]
    if not source.shape or not isinstance(source.shape[-1], int):
        return None
    width, last = source.shape[-1], len(source.shape) - 1
    numbers = [t.values.tolist() for t in node.inputs[1:] if isinstance(t, gs.Constant)]
    if len(numbers) != len(node.inputs) - 1:
        return None
    if node.op == "Slice":
        if len(numbers) < 3:  # no axes: it cuts every one from the first on
            return None
        starts, ends, axes, *steps = numbers
        if axes not in ([-1], [last]) or steps not in ([], [[1]]):
            return None
        start, end = (int(np.clip(b + width * (b < 0), 0, width)) for b in (starts[0], ends[0]))
        return Columns(source, start, end)
    given = (
        numbers[0] if numbers else [output.shape and output.shape[-1] for output in node.outputs]
    )
    widths = [size for size in given if isinstance(size, int)]
    if node.attrs.get("axis", 0) not in (-1, last) or len(widths) < len(node.outputs):
        return None
    index = next(i for i, output in enumerate(node.outputs) if output is tensor)
    start = sum(widths[:index])
    return Columns(source, start, start + widths[index])


def packed_source(parts: Sequence[Columns | None]) -> gs.Variable | None:
    """Return the tensor whose columns are these parts, in their order, and nothing else."""
    source, end = None, 0
    for part in parts:
        if part is None or part.start != end or (source is not None and part.source is not source):
            return None
        source, end = part.source, part.end
    return source if source is not None and end == source.shape[-1] else None
