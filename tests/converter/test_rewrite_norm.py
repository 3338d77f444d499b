"""Norms spelled with powers and means become one node that computes the same."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest

from kvconv.converter.rewrite import norm
from kvconv.converter.rewrite.graph import Editor, sort
from rewrite_graphs import Builder, split_heads

WIDTH, EPSILON = 32, 0.125


def spelled_out(b: Builder, x: gs.Variable, weight: gs.Tensor, **how: Any) -> gs.Variable:
    """Append a norm as models spell it.

    Args:
        b: Of the graph.
        x: [.., width].
        weight: [width].
        how: `mean` and `weigh` change what is averaged and which operator applies the weight;
            `half` computes in float32 between two Casts.
    """
    wide = b.op("Cast", x, to=np.float32, dtype=np.float32, shape=x.shape) if "half" in how else x
    square = (
        b.op("Mul", wide, wide)
        if "mul" in how
        else b.op("Pow", wide, b.const(how.get("power", 2), wide.dtype))
    )
    axis = how.get("mean", -1)
    mean = b.op("ReduceMean", square, b.const([axis]), keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.const(EPSILON, wide.dtype)))
    normal = b.op("Mul", wide, b.op("Reciprocal", root), shape=x.shape)
    if "half" in how:
        normal = b.op("Cast", normal, to=x.dtype.type, dtype=x.dtype, shape=x.shape)
    return b.op(how.get("weigh", "Mul"), weight, normal, dtype=x.dtype, shape=x.shape)


def build(*, heads: bool = False, opset: int = 23, **how: Any) -> tuple[Builder, gs.Variable]:
    """Return a graph with one norm, of hidden states or of transposed heads."""
    b = Builder(dtype=np.float16 if "half" in how else np.float32, head_dim=WIDTH, opset=opset)
    shape = ["batch_size", "sequence_length", 3 * WIDTH if heads else WIDTH]
    x = gs.Variable("x", b.dtype, shape)
    b.graph.inputs = [x]
    hidden = split_heads(b, x, 3, WIDTH) if heads else x
    y = spelled_out(b, hidden, b.weight(WIDTH), **how)
    b.graph.outputs = [b.op("Neg", y, shape=y.shape)]
    return b, x


def run(graph: gs.Graph, x: Any) -> Any:
    graph.cleanup()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = gs.export_onnx(graph).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("how", [{}, {"mul": True}, {"half": True}], ids=["pow", "mul", "half"])
@pytest.mark.parametrize("heads", [False, True], ids=["hidden", "heads"])
def test_norm_becomes_one_node_with_the_same_numbers(how: dict[str, Any], heads: bool) -> None:
    b, x = build(heads=heads, **how)
    values = np.random.default_rng(1).standard_normal((2, 5, x.shape[2])).astype(b.dtype) * 2
    before = run(b.graph, values)
    assert norm.apply(Editor(b.graph)).count == 1
    sort(b.graph)
    ops = ["RMSNormalization", "Neg"]
    assert [n.op for n in b.graph.nodes] == (
        ["Reshape", "RMSNormalization", "Transpose", "Neg"] if heads else ops
    )
    after = run(b.graph, values)
    # float16: the node rounds once, the model before and after its weight.
    np.testing.assert_allclose(after, before, rtol=3e-3 if b.dtype == np.float16 else 1e-5)
    assert norm.apply(Editor(b.graph)).count == 0


@pytest.mark.parametrize(
    "how",
    [{"power": 3}, {"mean": 1}, {"weigh": "Add"}],
    ids=["cubes", "mean over tokens", "no weight"],
)
def test_something_else_stays(how: dict[str, Any]) -> None:
    b, _ = build(**how)
    nodes = len(b.graph.nodes)
    assert norm.apply(Editor(b.graph)).count == 0
    assert len(b.graph.nodes) == nodes


def test_norm_behind_a_transpose_without_perm_stays_behind_it() -> None:
    b = Builder(head_dim=WIDTH)
    x = gs.Variable("x", b.dtype, [WIDTH, "sequence_length", "batch_size"])
    b.graph.inputs = [x]
    turned = b.op("Transpose", x, shape=x.shape[::-1])
    y = spelled_out(b, turned, b.weight(WIDTH))
    b.graph.outputs = [b.op("Neg", y, shape=y.shape)]
    values = np.random.default_rng(1).standard_normal((WIDTH, 3, 2)).astype(np.float32)
    before = run(b.graph, values)
    assert norm.apply(Editor(b.graph)).count == 1
    sort(b.graph)
    assert [n.op for n in b.graph.nodes] == ["Transpose", "RMSNormalization", "Neg"]
    np.testing.assert_allclose(run(b.graph, values), before, rtol=1e-5)


def test_older_opsets_have_no_such_node(tmp_path: Path) -> None:
    b, _ = build(opset=18)
    assert norm.apply(Editor(b.graph)).count == 0
