"""A residual Add and its norm become one node, whose sum the rest of the graph reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from kvconv import names
from kvconv.converter.rewrite import skip_norm
from kvconv.converter.rewrite.graph import Editor, sort
from rewrite_graphs import BATCH, SEQUENCE, Builder, open_session, run

WIDTH = 40
SHAPE = [BATCH, SEQUENCE, WIDTH]
FUSED = {
    "RMSNormalization": names.SKIP_RMS_NORMALIZATION,
    "LayerNormalization": names.SKIP_LAYER_NORMALIZATION,
}
EPSILON = 0.125


def norm(b: Builder, op: str, x: gs.Tensor, *, epsilon: float = EPSILON, bias: bool = True) -> Any:
    vectors = 2 if op == "LayerNormalization" and bias else 1
    weights = [b.weight(WIDTH) for _ in range(vectors)]
    return b.op(op, x, *weights, shape=SHAPE, axis=-1, epsilon=epsilon)


def build(
    op: str = "RMSNormalization",
    *,
    dtype: type = np.float32,
    skip_shape: Sequence[Any] = SHAPE,
    bias: bool = True,
    before: str = "",
    inner_epsilon: float = EPSILON,
    is_shared: bool = False,
    is_swapped: bool = False,
) -> gs.Graph:
    """Return x -> [before ->] Add -> norm -> Tanh, whose result is added to the sum again.

    Args:
        op: The norm.
        dtype: Of all tensors.
        skip_shape: Shape of the Add's other operand.
        bias: Whether a LayerNormalization has one.
        before: What prepares x: `Add` of a vector, a norm, or nothing.
        inner_epsilon: Of that norm.
        is_shared: Whether the result reads what was prepared, too.
        is_swapped: Whether x is the Add's second operand.
    """
    b = Builder(dtype=dtype)
    x, skip = gs.Variable("x", b.dtype, SHAPE), gs.Variable("skip", b.dtype, list(skip_shape))
    b.graph.inputs = [x, skip]
    prepared = x
    if before == "Add":
        prepared = b.op("Add", b.weight(WIDTH), x, shape=SHAPE)
    elif before:
        prepared = norm(b, before, x, epsilon=inner_epsilon)
    operands = (skip, prepared) if is_swapped else (prepared, skip)
    total = b.op("Add", *operands, shape=SHAPE)
    normed = norm(b, op, total, bias=bias)
    last = b.op("Add", total, b.op("Tanh", normed, shape=SHAPE), shape=SHAPE)
    b.output(b.op("Add", last, prepared, shape=SHAPE) if is_shared else last, "y")
    return b.graph


def nodes_after(folder: Path, **how: Any) -> list[gs.Node]:
    """Apply the rule, compare the numbers with those before it, and return the nodes."""
    dtype = how.get("dtype", np.float32)
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, 3, WIDTH)).astype(dtype) for name in ("x", "skip")}
    before = run(open_session(build(**how), folder), feeds)["y"]
    graph = build(**how)
    assert skip_norm.apply(Editor(graph)).count == 1
    sort(graph)
    after = run(open_session(graph, folder), feeds)["y"]
    tolerance = 1e-5 if dtype is np.float32 else 5e-3
    np.testing.assert_allclose(after, before, rtol=tolerance, atol=tolerance)
    assert skip_norm.apply(Editor(graph)).count == 0
    return list(graph.nodes)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("op", FUSED)
def test_sum_and_norm_become_one_node_with_the_same_numbers(
    op: str, dtype: type, tmp_path: Path
) -> None:
    nodes = nodes_after(tmp_path, op=op, dtype=dtype)
    assert [node.op for node in nodes] == [FUSED[op], "Tanh", "Add"]


def test_layer_norm_without_bias_has_none_afterwards(tmp_path: Path) -> None:
    nodes = nodes_after(tmp_path, op="LayerNormalization", bias=False)
    assert [len(node.inputs) for node in nodes] == [3, 1, 2]


@pytest.mark.parametrize("is_swapped", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(
    ("op", "before"),
    [("LayerNormalization", "Add"), ("RMSNormalization", "RMSNormalization")],
    ids=["bias", "post-norm"],
)
def test_what_prepares_an_operand_goes_into_the_node(
    op: str, before: str, is_swapped: bool, tmp_path: Path
) -> None:
    nodes = nodes_after(tmp_path, op=op, before=before, is_swapped=is_swapped)
    assert [node.op for node in nodes] == [FUSED[op], "Tanh", "Add"]


@pytest.mark.parametrize(
    ("op", "before", "more"),
    [
        ("LayerNormalization", "Add", {"is_shared": True}),
        ("RMSNormalization", "RMSNormalization", {"is_shared": True}),
        ("RMSNormalization", "RMSNormalization", {"inner_epsilon": 0.5}),
        ("RMSNormalization", "Add", {}),
        ("LayerNormalization", "RMSNormalization", {}),
    ],
    ids=["shared bias", "shared norm", "another epsilon", "bias of rms", "norm of layer"],
)
def test_preparation_that_the_node_cannot_take_stays(
    op: str, before: str, more: dict[str, Any], tmp_path: Path
) -> None:
    nodes = nodes_after(tmp_path, op=op, before=before, **more)
    assert [node.op for node in nodes][:2] == [before, FUSED[op]]


@pytest.mark.parametrize("op", FUSED)
@pytest.mark.parametrize(
    "how", [{"dtype": np.float64}, {"skip_shape": (WIDTH,)}], ids=["float64", "broadcast"]
)
def test_other_types_and_shapes_stay(op: str, how: dict[str, Any]) -> None:
    graph = build(op, **how)
    assert skip_norm.apply(Editor(graph)).count == 0
