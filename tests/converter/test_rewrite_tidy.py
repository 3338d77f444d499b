"""Repeated work is merged, Identity and Constant nodes go, and nothing else changes."""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv.converter.rewrite import tidy
from kvconv.converter.rewrite.evaluate import Cut, make_probe
from kvconv.converter.rewrite.graph import Editor, find
from rewrite_graphs import Builder

PROBE = make_probe(np.ones((2, 6), np.int64), 3)


def results(b: Builder) -> list[list[int]]:
    return [array.tolist() for array in Cut(b.graph, b.graph.outputs).run(PROBE.feeds())]


def tidied(b: Builder) -> int:
    """Tidy, and assert that results stay and a second time does nothing."""
    before = results(b)
    editor = Editor(b.graph)
    count = tidy.apply(editor).count
    assert results(b) == before
    assert tidy.apply(editor).count == 0
    return count


def test_tidy_merges_equal_nodes_transitively() -> None:
    b = Builder()
    ends = [b.op("Neg", b.op("Add", b.positions, b.const(3))) for _ in range(3)]
    b.output(b.op("Sum", *[b.op("Cast", end, dtype=np.float32, to=1) for end in ends]), "sum")
    assert tidied(b) == 6
    assert [node.op for node in b.graph.nodes] == ["Add", "Neg", "Cast", "Sum"]


def test_tidy_keeps_nodes_that_differ() -> None:
    b = Builder()
    one = b.op("Add", b.positions, b.const(3))
    other = b.op("Add", b.positions, b.const(4))
    shapes = [b.op("Shape", one, dtype=np.int64, start=start) for start in (0, 1)]
    b.output(b.op("Mul", one, other), "product")
    b.output(b.op("Concat", *shapes, axis=0), "shapes")
    assert tidied(b) == 0


def test_tidy_keeps_equal_nodes_that_are_both_outputs() -> None:
    b = Builder()
    for name in ("first", "second"):
        b.output(b.op("Neg", b.positions), name)
    assert tidied(b) == 0
    assert [tensor.name for tensor in b.graph.outputs] == ["first", "second"]


def test_tidy_drops_identity_and_keeps_output_names() -> None:
    b = Builder()
    doubled = b.op("Identity", b.op("Add", b.op("Identity", b.positions), b.positions))
    b.output(b.op("Identity", doubled), "doubled")
    b.output(b.op("Neg", doubled), "negative")
    b.output(b.op("Identity", b.positions), "copy")  # an input under another name: must stay
    assert tidied(b) == 3
    assert len(find(b.graph, "Identity")) == 1


def test_tidy_drops_slices_that_cut_nothing() -> None:
    b = Builder()
    last = np.iinfo(np.int64).max
    whole = b.op("Slice", b.positions, b.const([0]), b.const([last]), b.const([1]), b.const([1]))
    part = b.op("Slice", whole, b.const([1]), b.const([last]), b.const([1]), b.const([1]))
    b.output(b.op("Neg", part), "negative")
    assert tidied(b) == 1


def test_tidy_lifts_constant_nodes() -> None:
    b = Builder()
    five = gs.Variable("five", np.dtype(np.int64), [])
    attrs = {"value": gs.Constant("value", np.array(5))}
    b.graph.nodes.append(gs.Node("Constant", "constant", attrs, [], [five]))
    b.output(b.op("Add", b.positions, five), "sum")
    assert tidied(b) == 1
    assert [node.op for node in b.graph.nodes] == ["Add"]


def test_tidy_sorts_nodes() -> None:
    b = Builder()
    b.output(b.op("Neg", b.op("Add", b.positions, b.const(1))), "negative")
    b.graph.nodes.reverse()
    assert tidied(b) == 0
    assert [node.op for node in b.graph.nodes] == ["Add", "Neg"]


def test_tidy_deep_chain_does_not_overrun_the_stack() -> None:
    b = Builder()
    x = b.positions
    for _ in range(3000):
        x = b.op("Neg", x)
    b.output(x, "end")
    assert tidied(b) == 0
