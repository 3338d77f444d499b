"""Rule `past_length`: the past length comes from the mask, never from the cache's shape.

In the shared buffer mode dimension 2 of past_key_values is a capacity, so every
`Shape(past_key_values.*)`, and every Shape of past and new together, becomes

    [batch_size, num_key_value_heads, Shape(attention_mask)[1] - Shape(input_ids)[1], head_dim]
    [batch_size, num_key_value_heads, Shape(attention_mask)[1],                       head_dim]

Right in concat mode too, where the mask is as wide as past and new together.
"""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    find,
    is_past,
    producer,
    replace_uses,
)

NAME = "past_length"


def apply(editor: Editor) -> Outcome:
    """Replace the shapes of cached tensors."""
    count = 0
    refusals = []
    for shape in find(editor.graph, "Shape"):
        if (past := _pattern(shape)) is None:
            continue
        if (reason := _check(past)) is not None:
            refusals.append(Refusal(NAME, shape.name, reason))
            continue
        _rewrite(editor, shape, past)
        count += 1
    return Outcome(count, tuple(refusals))


def _pattern(shape: gs.Node) -> gs.Variable | None:
    """Return the past tensor whose shape, alone or with the new part, a Shape node takes."""
    tensor = shape.inputs[0]
    above = producer(tensor)
    if above is not None and above.op == "Concat" and above.attrs["axis"] in (2, -2):
        tensor = above.inputs[0]
    return tensor if is_past(tensor) else None


def _check(past: gs.Variable) -> str | None:
    """Return why the shape cannot be spelled, or None."""
    shape = past.shape
    if shape is None or len(shape) != 4 or not all(isinstance(shape[i], int) for i in (1, 3)):
        return f"{past.name} has shape {shape}; heads and head_dim must be numbers"
    return None


def _rewrite(editor: Editor, shape: gs.Node, past: gs.Variable) -> None:
    total = editor.dimension(names.ATTENTION_MASK, 1)
    length = total
    if shape.inputs[0] is past:
        new = editor.dimension(names.INPUT_IDS, 1)
        length = editor.add("Sub", [total, new], dtype=np.int64, shape=[1])
    dimensions = [
        editor.dimension(names.INPUT_IDS, 0), editor.ints(past.shape[1]),
        length, editor.ints(past.shape[3]),
    ][slice(shape.attrs.get("start", 0), shape.attrs.get("end"))]  # fmt: skip
    if len(dimensions) == 1:
        result = dimensions[0]
    else:
        result = editor.add(
            "Concat", dimensions, {"axis": 0}, dtype=np.int64, shape=[len(dimensions)]
        )
    replace_uses(shape.outputs[0], result)
