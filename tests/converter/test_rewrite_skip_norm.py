"""A residual Add and its norm become one node, whose sum the rest of the graph reads."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from kvconv import names
from kvconv.converter.rewrite import skip_norm
from kvconv.converter.rewrite.graph import Editor, sort
from rewrite_graphs import BATCH, SEQUENCE, Builder, open_session, run

WIDTH = 40


def build(
    *,
    dtype: type = np.float32,
    skip_shape: Any = (BATCH, SEQUENCE, WIDTH),
    attrs: Mapping[str, Any] = MappingProxyType({"axis": -1, "epsilon": 0.125}),
) -> gs.Graph:
    """Return x -> Add -> norm -> Tanh, whose result is added to the sum again."""
    b = Builder(dtype=dtype)
    shape = [BATCH, SEQUENCE, WIDTH]
    x, skip = gs.Variable("x", b.dtype, shape), gs.Variable("skip", b.dtype, list(skip_shape))
    b.graph.inputs = [x, skip]
    total = b.op("Add", x, skip, shape=shape)
    normed = b.op("RMSNormalization", total, b.weight(WIDTH), shape=shape, **attrs)
    b.output(b.op("Add", total, b.op("Tanh", normed, shape=shape), shape=shape), "y")
    return b.graph


@pytest.mark.parametrize(
    "how", [{}, {"attrs": {}}], ids=["attributes given", "attributes left to their defaults"]
)
def test_sum_and_norm_become_one_node_with_the_same_numbers(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    random = np.random.default_rng(0)
    # So small that epsilon decides.
    feeds = {name: random.standard_normal((2, 3, WIDTH)) * 1e-3 for name in ("x", "skip")}
    feeds = {name: values.astype(np.float32) for name, values in feeds.items()}
    before = run(open_session(build(**how), tmp_path), feeds)["y"]
    graph = build(**how)
    assert skip_norm.apply(Editor(graph)).count == 1
    sort(graph)
    assert [node.op for node in graph.nodes] == [names.SKIP_RMS_NORMALIZATION, "Tanh", "Add"]
    after = run(open_session(graph, tmp_path), feeds)["y"]
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    assert skip_norm.apply(Editor(graph)).count == 0


@pytest.mark.parametrize(
    "how", [{"dtype": np.float16}, {"skip_shape": (WIDTH,)}], ids=["float16", "broadcast"]
)
def test_other_types_and_shapes_stay(how: dict[str, Any]) -> None:
    graph = build(**how)
    assert skip_norm.apply(Editor(graph)).count == 0
