"""A constant factor of the query goes into the attention's scale."""

from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import rewrite, scale
from kvconv.converter.rewrite.graph import Editor, find, producer
from tolerances import assert_close


def build(op: str, values: object, *, swap: bool = False, key: bool = False) -> gs.Graph:
    """Return a decoder whose queries (or keys) are multiplied or divided by a constant."""
    graph = graphs.decoder()
    matmul = find(graph, "MatMul")[1 if key else 0]
    old = matmul.outputs[0]
    whole = gs.Variable("whole", old.dtype, old.shape)
    matmul.outputs = [whole]
    factor = gs.Constant("factor", np.asarray(values, np.float32))
    inputs = [factor, whole] if swap else [whole, factor]
    node = gs.Node(op, "scale", {}, inputs, [old])
    graph.nodes.insert(graph.nodes.index(matmul) + 1, node)
    return graph


@pytest.mark.parametrize("attention", ["flash", "gqa"])
@pytest.mark.parametrize(
    ("op", "value", "swap", "factor"),
    [("Mul", 0.25, False, 0.25), ("Mul", [3.0], True, 3.0), ("Div", 0.5, False, 2.0)],
    ids=["product", "swapped", "quotient"],
)
def test_factor_goes_into_the_scale(
    op: str, value: object, swap: bool, factor: float, attention: str, tmp_path: Path
) -> None:
    feeds = graphs.make_feeds(graphs.decoder(), np.ones((1, 9), np.int64), 5)
    expected = graphs.run_traced(build(op, value, swap=swap), feeds)
    graph = build(op, value, swap=swap)
    report = rewrite(graph, attention=attention, opset=23, max_sequence_length=32)
    assert report.counts["scale"] == 1
    nodes = [node for node in graph.nodes if "scale" in node.attrs and node.domain]
    assert [node.attrs["scale"] for node in nodes] == [pytest.approx(factor * 8**-0.5)]
    result = graphs.run(graphs.open_session(graph, tmp_path), feeds)
    for name, array in expected.items():
        assert_close(result[name], array, "float32", name)
    again = rewrite(graph, attention=attention, opset=23, max_sequence_length=32)
    assert set(again.counts.values()) == {0}


@pytest.mark.parametrize(
    "graph",
    [
        build("Mul", np.full(32, 0.25)),
        build("Div", 0.5, swap=True),
        build("Mul", 0.0),
        build("Mul", 0.25, key=True),
    ],
    ids=["vector", "inverse", "zero", "key"],
)
def test_what_is_no_factor_of_the_query_stays(graph: gs.Graph) -> None:
    assert rewrite(graph, attention="flash", opset=23).counts["scale"] == 0
    (node,) = find(graph, names.OP_NAME, names.OP_DOMAIN)
    nodes = [producer(tensor) for tensor in node.inputs[:2]]
    assert any(above is not None and above.name == "scale" for above in nodes)
    assert scale.apply(Editor(graph)).count == 0
