"""Sorts the columns of a projection that holds query, key and value head by head.

Some checkpoints (GPT-NeoX, BLOOM, Falcon, InternLM2) store one projection for all three, in which
the columns of a head's query, key and value lie side by side. Reshapes, Transposes and Slices then
take the three apart in every run:

    before   MatMul(x, [q0 k0 v0 q1 k1 v1 ...]) [+ bias] -> moves -> three cuts
    after    Split(MatMul(x, [q0 q1 .. | k0 k1 .. | v0 v1 ..]) [+ bias]) -> moves -> the same three

Which columns a cut takes is learned by running the moves on the numbers of columns. The weight
stays where it is until it is written, in runs of columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common

from kvconv import names
from kvconv.converter.linear_weight import LinearWeight, Rows

_Array = npt.NDArray[np.int64]
_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze"}
_CUTS = {"Split", "Slice", "Gather", "GatherND"}
_SIZES = {names.DIM_BATCH: 2, names.DIM_SEQUENCE: 3}
"""Dimensions of the run that shows where columns go; no move may mix them with others."""


class _UnlikeError(Exception):
    """What reads a projection is not made of moves and three cuts."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one cut takes from a projection.

    Attributes:
        value: The cut's output.
        columns: The projection's columns, in the order of the value's other axes.
        perm: Axes of the value as they follow from [batch_size, sequence_length, ...].
        sizes: Of those other axes.
    """

    value: ir.Value
    columns: _Array
    perm: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Projection:
    """A product with a weight that nothing else reads.

    Attributes:
        matmul: The product.
        tensor: Its weight.
        output: [batch_size, sequence_length, columns], bias included.
        bias: [columns], or None.
    """

    matmul: ir.Node
    tensor: LinearWeight
    output: ir.Value
    bias: ir.Value | None


def sort_columns(model: ir.Model) -> int:
    """Sort the columns of every such projection, in place; returns how many there were.

    Args:
        model: Laid out and simplified.
    """
    count = 0
    for node in list(model.graph):
        projection = _pattern(node)
        if projection is not None and (parts := _check(projection)) is not None:
            _rewrite(model.graph, projection, parts)
            count += 1
    common.RemoveUnusedNodesPass()(model)
    return count


def _pattern(node: ir.Node) -> _Projection | None:
    weight = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
    tensor = None if weight is None else weight.const_value
    if weight is None or not isinstance(tensor, LinearWeight) or len(weight.uses()) != 1:
        return None
    output, bias = node.outputs[0], None
    readers = list(output.consumers())
    if len(readers) == 1 and readers[0].op_type == "Add":
        bias = next((value for value in readers[0].inputs if value is not output), None)
        if bias is None or bias.const_value is None or len(bias.uses()) != 1:
            return None
        output = readers[0].outputs[0]
    if len(tensor.rows) > 1 or output.shape is None or len(output.shape) != 3:
        return None
    return _Projection(node, tensor, output, bias)


def _check(projection: _Projection) -> list[_Part] | None:
    """Return the three parts in the order of their first columns, if they are worth a Split."""
    output = projection.output
    assert output.shape is not None
    width = sum(projection.tensor.widths)
    shape = (*_SIZES.values(), width)
    if output.is_graph_output() or all(node.op_type in _CUTS for node in output.consumers()):
        return None  # a Split or Slices already
    numbers = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    try:
        parts = [_part(value, array, width) for value, array in _cut(output, numbers)]
    except _UnlikeError:
        return None
    # Two parts are the rotated and the other columns of one of the three.
    columns = np.concatenate([part.columns for part in parts]) if len(parts) == 3 else np.empty(0)
    if not np.array_equal(np.sort(columns), np.arange(width)):
        return None
    return sorted(parts, key=lambda part: int(part.columns[0]))


def _cut(value: ir.Value, numbers: _Array) -> Iterator[tuple[ir.Value, _Array]]:
    """Yield what cuts make of a value, and the numbers in it, through moves."""
    for node in value.consumers():
        if node.inputs[0] is not value or value.is_graph_output() or node.domain:
            raise _UnlikeError
        if node.op_type in _CUTS:
            pieces = _run_cut(node, numbers)
            if pieces[0].size == numbers.size:  # a Slice that cuts nothing
                yield from _cut(node.outputs[0], pieces[0])
            else:
                yield from zip(node.outputs, pieces, strict=True)
        elif node.op_type in _MOVES:
            yield from _cut(node.outputs[0], _run_move(node, numbers))
        else:
            raise _UnlikeError


def _run_move(node: ir.Node, numbers: _Array) -> _Array:
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm", tuple(reversed(range(numbers.ndim))))
        return numbers.transpose(perm)
    if node.op_type == "Squeeze":
        return numbers.squeeze(tuple(_constant(node, 1).tolist()))
    if node.op_type == "Unsqueeze":
        return np.expand_dims(numbers, tuple(_constant(node, 1).tolist()))
    shape = node.outputs[0].shape
    if shape is None:
        raise _UnlikeError
    sizes = [dim if isinstance(dim, int) else _SIZES.get(str(dim), 0) for dim in shape]
    if np.prod(sizes) != numbers.size:
        raise _UnlikeError
    return numbers.reshape(sizes)


def _run_cut(node: ir.Node, numbers: _Array) -> list[_Array]:
    axis = node.attributes.get_int("axis", 0)
    if node.op_type == "Split":
        if len(node.inputs) > 1:
            return np.split(numbers, np.cumsum(_constant(node, 1))[:-1], axis)
        if numbers.shape[axis] % len(node.outputs):
            raise _UnlikeError
        return np.split(numbers, len(node.outputs), axis)
    if node.op_type == "Gather":
        return [np.take(numbers, _constant(node, 1), axis)]
    if node.op_type == "GatherND":
        if node.attributes.get_int("batch_dims", 0):
            raise _UnlikeError
        return [numbers[tuple(np.moveaxis(_constant(node, 1), -1, 0))]]
    starts, ends, axes = (_constant(node, index).tolist() for index in (1, 2, 3))
    steps = _constant(node, 4).tolist() if len(node.inputs) > 4 else [1] * len(axes)
    cuts = [slice(None)] * numbers.ndim
    for start, end, at, step in zip(starts, ends, axes, steps, strict=True):
        cuts[at] = slice(start, end, step)
    return [numbers[tuple(cuts)]]


def _constant(node: ir.Node, index: int) -> _Array:
    value = node.inputs[index]
    if value is None or value.const_value is None:
        raise _UnlikeError
    return value.const_value.numpy()


def _part(value: ir.Value, numbers: _Array, width: int) -> _Part:
    """Find batch, sequence and columns in what a cut took."""
    steps = (_SIZES[names.DIM_SEQUENCE] * width, width)
    axes = [
        axis
        for wanted, step in zip(_SIZES.values(), steps, strict=True)
        for axis, size in enumerate(numbers.shape)
        if size == wanted and (np.diff(numbers, axis=axis) == step).all()
    ]
    if len(axes) != len(steps):
        raise _UnlikeError
    order = [*axes, *(axis for axis in range(numbers.ndim) if axis not in axes)]
    moved = numbers.transpose(order)
    perm = tuple(int(axis) for axis in np.argsort(order))
    return _Part(value, moved[0, 0].ravel(), perm, moved.shape[2:])


def _rewrite(graph: ir.Graph, projection: _Projection, parts: list[_Part]) -> None:
    tensor, output = projection.tensor, projection.output
    columns = np.concatenate([part.columns for part in parts])
    runs = np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1)
    sorted_tensor = LinearWeight(
        tensor.name or "",
        [_run_of(tensor.rows[0], int(run[0]), len(run)) for run in runs],
        [len(run) for run in runs],
        in_features=tensor.shape.numpy()[0],
        dtype=tensor.dtype,
    )
    weight, bias = projection.matmul.inputs[1], projection.bias
    assert weight is not None
    weight.const_value = sorted_tensor
    if bias is not None:
        assert bias.const_value is not None
        bias.const_value = ir.tensor(bias.const_value.numpy()[columns], name=bias.name)

    tape = ir.tape.Tape()
    widths = tape.initializer(
        ir.tensor([len(part.columns) for part in parts], name=f"{tensor.name}.widths")
    )
    pieces = tape.op_multi_out(
        "Split", [output, widths], attributes={"axis": -1}, num_outputs=len(parts)
    )
    leading = list(output.shape or ())[:2]
    new_values = []
    for index, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        sizes = tape.initializer(ir.tensor([0, 0, *part.sizes], name=f"{tensor.name}.part_{index}"))
        new = tape.op("Reshape", [piece, sizes])
        piece.shape = ir.Shape([*leading, len(part.columns)])
        dims = [*leading, *part.sizes]
        new.shape = ir.Shape(dims)
        if part.perm != tuple(range(len(part.perm))):
            new = tape.op("Transpose", [new], attributes={"perm": part.perm})
            new.shape = ir.Shape([dims[axis] for axis in part.perm])
        new_values.append(new)
    for node in tape.nodes:
        for value in node.outputs:
            value.type = ir.TensorType(tensor.dtype)
    for initializer in tape.initializers:
        graph.register_initializer(initializer)
    last = output.producer()
    assert last is not None
    graph.insert_after(last, tape.nodes)
    for part, new in zip(parts, new_values, strict=True):
        part.value.replace_all_uses_with(new)


def _run_of(rows: Rows, start: int, count: int) -> Rows:
    """Give some rows of a weight, a view where the weight is one."""
    return lambda: rows()[start : start + count]
