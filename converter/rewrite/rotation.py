"""Rotary embedding for attention nodes that do not take cos and sin of the run.

FlashAttention takes them as [batch_size or 1, sequence_length, R/2], computed once per run. A node
may want tables of all positions instead, or no rotation at all: then it stands in the graph.
"""

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.evaluate import Array, Cut, NotEvaluableError
from kvconv.converter.rewrite.graph import Editor, cast, upstream

_MAX_TABLE_BYTES = 2**28
_PROBES = ((1, 1), (2, 5), (3, 2))
"""Batch size and sequence length of the runs that tables are compared with."""


def tables_by_position(
    editor: Editor, cos: gs.Variable, sin: gs.Variable, *, dtype: np.dtype
) -> tuple[gs.Variable, gs.Variable] | str:
    """Add tables of all positions, computed as the graph computes those of a run.

    They hang on constants alone, so ONNX Runtime folds them when it loads the model, and the file
    stays small. That a run's rows depend on nothing but each token's position is evaluated.

    Args:
        editor: Of the graph; knows how many positions there are.
        cos: [batch_size or 1, sequence_length, R/2] float32.
        sin: Same shape and type.
        dtype: Type wanted; refused where it cannot hold the values exactly.

    Returns:
        Both as [max_sequence_length, R/2], or why not.
    """
    length = editor.max_sequence_length
    if length is None:
        return "the number of positions is not known"
    try:
        cut = Cut(editor.graph, [cos, sin])
        width = _run(cut, np.zeros((1, 1), np.int64))[0].shape[-1]
        size = length * width * dtype.itemsize
        if size > _MAX_TABLE_BYTES:
            return (
                f"a table of {length} positions takes {size / 1e6:.0f} MB, more than "
                f"{_MAX_TABLE_BYTES / 1e6:.0f} MB; a smaller --max-sequence-length takes less"
            )
        tables = [table[0] for table in _run(cut, np.arange(length)[np.newaxis])]
        random = np.random.default_rng(0)
        for shape in _PROBES:
            positions = random.integers(0, length, shape)
            for table, run in zip(tables, _run(cut, positions), strict=True):
                if not np.allclose(run, table[positions], rtol=0, atol=1e-6):
                    return "its cos and sin depend on more than each token's position"
    except NotEvaluableError as error:
        return f"its cos and sin have no table: {error}"
    if not all((table.astype(dtype) == table).all() for table in tables):
        return f"its cos and sin are not exact in {dtype}"
    numbers = [editor.constant(np.array(value, np.int64)) for value in (0, length, 1)]
    positions = editor.add("Range", numbers, dtype=np.int64, shape=[length])
    positions = editor.add("Unsqueeze", [positions, editor.ints(0)], dtype=np.int64)
    copies = (
        editor.add("Squeeze", [table, editor.ints(0)], dtype=np.float32, shape=[length, width])
        for table in _copy(editor, (cos, sin), positions)
    )
    cos, sin = (cast(editor, table, dtype) for table in copies)
    return cos, sin


def rotate(
    editor: Editor,
    tensor: gs.Variable,
    cos: gs.Variable,
    sin: gs.Variable,
    *,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
) -> gs.Variable:
    """Add the nodes that rotate queries or keys [batch_size, sequence_length, heads * head_dim].

    Args:
        editor: Of the graph.
        tensor: What to rotate; the numbers are rotated in float32, as FlashAttention does.
        cos: [batch_size or 1, sequence_length, rotary_dim / 2] float32.
        sin: Same shape and type.
        heads: Heads of the tensor.
        head_dim: Width of a head.
        rotary_dim: Elements of each head that are rotated, from the first.
        interleaved: Pairs are (0, 1), (2, 3) ...; otherwise (0, R/2), (1, R/2 + 1) ...
    """
    half, dtype = rotary_dim // 2, tensor.dtype

    def op(name: str, *inputs: gs.Tensor) -> gs.Variable:
        return editor.add(name, inputs, dtype=np.float32)

    def part(of: gs.Tensor, start: int, end: int, step: int = 1) -> gs.Variable:
        return op("Slice", of, *(editor.ints(value) for value in (start, end, -1, step)))

    x = op("Reshape", cast(editor, tensor, np.float32), editor.ints(0, 0, heads, head_dim))
    if interleaved:
        first, second = (part(x, start, rotary_dim, 2) for start in (0, 1))
    else:
        first, second = part(x, 0, half), part(x, half, rotary_dim)
    cos, sin = (op("Unsqueeze", table, editor.ints(2)) for table in (cos, sin))
    turned = [
        op("Sub", op("Mul", first, cos), op("Mul", second, sin)),
        op("Add", op("Mul", second, cos), op("Mul", first, sin)),
    ]
    if interleaved:
        turned = [op("Unsqueeze", each, editor.ints(4)) for each in turned]
        pairs = editor.add("Concat", turned, {"axis": -1}, dtype=np.float32)
        turned = [op("Reshape", pairs, editor.ints(0, 0, heads, rotary_dim))]
    if rotary_dim < head_dim:
        turned.append(part(x, rotary_dim, head_dim))
    whole = editor.add("Concat", turned, {"axis": -1}, dtype=np.float32)
    merged = editor.add(
        "Reshape", [whole, editor.ints(0, 0, heads * head_dim)],
        dtype=np.float32, shape=[names.DIM_BATCH, names.DIM_SEQUENCE, heads * head_dim],
    )  # fmt: skip
    return cast(editor, merged, dtype)


def _run(cut: Cut, positions: Array) -> list[Array]:
    """Compute cos and sin of positions [batch_size, sequence_length], one row per token."""
    feeds = {names.POSITION_IDS: positions, names.INPUT_IDS: np.zeros_like(positions)}
    return [np.broadcast_to(t, (*positions.shape, t.shape[-1])) for t in cut.run(feeds)]


def _copy(
    editor: Editor, outputs: Sequence[gs.Variable], positions: gs.Variable
) -> list[gs.Variable]:
    """Repeat the nodes that compute tensors, for other positions than the run's."""
    made = {names.POSITION_IDS: positions, names.INPUT_IDS: positions}  # the latter's shape only
    for node in upstream(outputs):
        copies = [gs.Variable(editor.fresh(node.op), tensor.dtype) for tensor in node.outputs]
        inputs = [made.get(tensor.name, tensor) for tensor in node.inputs]
        editor.add_node(node.op, inputs, copies, node.attrs, domain=node.domain)
        made |= {tensor.name: copy for tensor, copy in zip(node.outputs, copies, strict=True)}
    return [made[tensor.name] for tensor in outputs]
