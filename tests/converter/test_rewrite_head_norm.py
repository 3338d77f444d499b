"""Norms of query and key heads behind a packed projection become one node."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import rewrite
from kvconv.converter.rewrite.graph import find
from tolerances import assert_close

HEAD_DIM = 8


def build(
    *,
    normed: tuple[str, ...] = ("query", "key"),
    epsilons: tuple[float, float] = (0.5, 0.5),
    order: tuple[int, ...] = (0, 1, 2),
) -> gs.Graph:
    """Return a decoder of one layer with a packed projection and norms of its heads.

    Args:
        normed: Whose heads have a norm.
        epsilons: Of the norm of query and of key.
        order: Of query, key and value in the projection.
    """
    graph = graphs.decoder(head_dim=HEAD_DIM, kv_heads=2)
    graphs.pack_projections(graph, order=order)
    random = np.random.default_rng(5)
    transposes = find(graph, "Transpose")[:2]
    for name, transpose, epsilon in zip(("query", "key"), transposes, epsilons, strict=True):
        if name not in normed:
            continue
        heads = transpose.inputs[0]
        weight = gs.Constant(f"{name}.norm", random.standard_normal(HEAD_DIM).astype("f"))
        output = gs.Variable(f"{name}.normed", heads.dtype, heads.shape)
        attrs = {"axis": -1, "epsilon": epsilon}
        node = gs.Node("RMSNormalization", f"{name}.norm", attrs, [heads, weight], [output])
        graph.nodes.insert(graph.nodes.index(transpose), node)
        transpose.inputs[0] = output
    return graph


def test_heads_are_normed_in_one_node_with_the_same_numbers(tmp_path: Path) -> None:
    feeds = graphs.make_feeds(build(), graphs.make_mask(4, 5), 5)
    expected = graphs.run_traced(build(), feeds)
    graph = build()
    report = rewrite(graph, attention="flash", opset=23)
    assert report.counts["head_norm"] == 1
    (norm,) = find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
    (node,) = find(graph, names.OP_NAME, names.OP_DOMAIN)
    assert [tensor.name for tensor in node.inputs[:3]] == [norm.outputs[0].name, "", ""]
    assert norm.inputs[0].name == "packed"
    assert not find(graph, "Split")
    assert not find(graph, "RMSNormalization")
    result = graphs.run(graphs.open_session(graph, tmp_path), feeds)
    for name, value in expected.items():
        assert_close(result[name], value, "float32", name)
    assert set(rewrite(graph, attention="flash", opset=23).counts.values()) == {0}


@pytest.mark.parametrize(
    "how",
    [{"normed": ("query",)}, {"epsilons": (0.5, 0.25)}, {"order": (1, 0, 2)}],
    ids=["one norm", "two epsilons", "another order"],
)
def test_other_norms_stay(how: dict[str, Any]) -> None:
    graph = build(**how)
    assert rewrite(graph, attention="flash", opset=23).counts["head_norm"] == 0
    assert find(graph, "RMSNormalization")


def test_gqa_keeps_its_norms() -> None:
    graph = build()
    rewrite(graph, attention="gqa", opset=23, max_sequence_length=32)
    assert len(find(graph, "RMSNormalization")) == 2
    assert not find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
