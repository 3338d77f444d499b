"""Attention reads one projection for queries, keys and values where nothing lies between."""

from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import packed_qkv, rewrite
from kvconv.converter.rewrite.graph import Editor, find
from tolerances import assert_close

OPS = {
    "flash": (names.OP_NAME, names.OP_DOMAIN),
    "gqa": (names.GROUP_QUERY_ATTENTION, names.ORT_DOMAIN),
}


@pytest.mark.parametrize("slices", [False, True], ids=["split", "slices"])
@pytest.mark.parametrize("style", ["half", "none"])
@pytest.mark.parametrize("attention", OPS)
def test_attention_reads_the_projection_itself(
    tmp_path: Path, attention: str, style: str, slices: bool
) -> None:
    def build() -> gs.Graph:
        return graphs.decoder(style=style, head_dim=16)

    mask = np.ones((1, 9), np.int64)
    feeds = graphs.make_feeds(build(), mask, 5)
    expected = graphs.run_traced(build(), feeds)
    graph = build()
    graphs.pack_projections(graph, slices=slices)
    report = rewrite(graph, attention=attention, opset=23, max_sequence_length=32)
    assert report.counts["packed_qkv"] == 1
    (node,) = find(graph, *OPS[attention])
    assert [tensor.name for tensor in node.inputs[:3]] == ["packed", "", ""]
    assert not find(graph, "Split")
    result = graphs.run(graphs.open_session(graph, tmp_path), feeds)
    for name, value in expected.items():
        assert_close(result[name], value, "float32", name)
    again = rewrite(graph, attention=attention, opset=23, max_sequence_length=32)
    assert set(again.counts.values()) == {0}


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1)], ids=["kqv", "qvk"])
def test_another_order_stays_split(order: tuple[int, ...]) -> None:
    graph = graphs.decoder(kv_heads=4)
    graphs.pack_projections(graph, order=order)
    assert rewrite(graph, attention="flash", opset=23).counts["packed_qkv"] == 0
    assert len(find(graph, "Split")) == 1


def test_norms_on_the_way_keep_the_operands_apart() -> None:
    graph = graphs.decoder()
    assert packed_qkv.apply(Editor(graph)).count == 0
    assert rewrite(graph, attention="flash", opset=23).counts["packed_qkv"] == 0
