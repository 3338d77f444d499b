"""The past length comes from the mask."""

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from kvconv import names
from kvconv.converter.rewrite import past_length
from kvconv.converter.rewrite.evaluate import Cut, make_probe
from kvconv.converter.rewrite.graph import Editor
from rewrite_graphs import Builder

PROBE = make_probe(np.ones((3, 12), np.int64), 5)


def shape_of(b: Builder, tensor: gs.Variable, **bounds: int) -> gs.Variable:
    """Return a Shape of a tensor that the graph needs."""
    shape = b.op("Shape", tensor, dtype=np.int64, **bounds)
    b.output(b.op("Identity", shape), "shape")
    return b.graph.outputs[0]


def values(b: Builder) -> list[int]:
    """Evaluate the output without any cache: the cut refuses to read one."""
    (result,) = Cut(b.graph, b.graph.outputs).run(PROBE.feeds())
    return result.tolist()


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, [3, 2, 7, 8]),
        ({"start": 2, "end": 3}, [7]),
        ({"start": 0, "end": 1}, [3]),
        ({"start": 1}, [2, 7, 8]),
        ({"start": -2, "end": -1}, [7]),
    ],
    ids=str,
)
def test_past_length_replaces_the_shape_of_a_cache(
    bounds: dict[str, int], expected: list[int]
) -> None:
    b = Builder()
    shape_of(b, b.past[0][1], **bounds)
    outcome = past_length.apply(Editor(b.graph))
    assert (outcome.count, outcome.refusals) == (1, ())
    assert values(b) == expected


def test_past_length_replaces_the_shape_of_past_and_new() -> None:
    b = Builder()
    new = b.op("Reshape", b.weight(1), b.const([1, 1, 1, 1]))
    present = b.op("Concat", b.past[0][0], new, axis=-2)
    shape_of(b, present)
    assert past_length.apply(Editor(b.graph)).count == 1
    assert values(b) == [3, 2, 12, 8]


def test_past_length_leaves_other_shapes_alone() -> None:
    b = Builder()
    shape_of(b, b.ids)
    assert past_length.apply(Editor(b.graph)).count == 0
    assert values(b) == [3, 5]


def test_past_length_twice_changes_nothing() -> None:
    b = Builder()
    shape_of(b, b.past[0][1])
    editor = Editor(b.graph)
    past_length.apply(editor)
    nodes = list(b.graph.nodes)
    b.graph.cleanup()
    assert past_length.apply(editor).count == 0
    assert len(b.graph.nodes) < len(nodes)


def test_past_length_with_unknown_heads_is_refused() -> None:
    b = Builder()
    b.past[0][0].shape = ["batch_size", "heads", "past", 8]
    shape_of(b, b.past[0][0])
    outcome = past_length.apply(Editor(b.graph))
    assert outcome.count == 0
    (refusal,) = outcome.refusals
    assert "heads and head_dim must be numbers" in str(refusal)
    assert names.past_key(0) in str(refusal)
