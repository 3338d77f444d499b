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


def pack(graph: gs.Graph, *, order: tuple[int, ...] = (0, 1, 2), slices: bool = False) -> None:
    """Turn the first three MatMuls, queries, keys and values, into one and a Split or Slices."""
    matmuls = find(graph, "MatMul")[:3]
    x = matmuls[0].inputs[0]
    ordered = [matmuls[index] for index in order]
    widths = [node.inputs[1].shape[1] for node in ordered]
    weight = np.concatenate([node.inputs[1].values for node in ordered], axis=1)
    packed = gs.Variable("packed", x.dtype, [*x.shape[:2], sum(widths)])
    outputs = [node.outputs[0] for node in ordered]
    place = graph.nodes.index(matmuls[0])
    for node in ordered:
        node.outputs.clear()
        node.inputs.clear()
        graph.nodes.remove(node)
    nodes = [gs.Node("MatMul", "project", {}, [x, gs.Constant("weight", weight)], [packed])]
    if slices:
        ends = [*np.cumsum(widths)[:-1], np.iinfo(np.int64).max]
        for i, (start, end) in enumerate(zip(np.cumsum([0, *widths[:-1]]), ends, strict=True)):
            bounds = [
                gs.Constant(f"{name}{i}", np.array([value]))
                for name, value in (("start", start), ("end", end), ("axis", 2), ("step", 1))
            ]
            nodes.append(gs.Node("Slice", f"cut{i}", {}, [packed, *bounds], [outputs[i]]))
    else:
        sizes = gs.Constant("widths", np.array(widths))
        nodes.append(gs.Node("Split", "split", {"axis": -1}, [packed, sizes], outputs))
    graph.nodes[place:place] = nodes


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
    pack(graph, slices=slices)
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
    pack(graph, order=order)
    assert rewrite(graph, attention="flash", opset=23).counts["packed_qkv"] == 0
    assert len(find(graph, "Split")) == 1


def test_norms_on_the_way_keep_the_operands_apart() -> None:
    graph = graphs.decoder()
    assert packed_qkv.apply(Editor(graph)).count == 0
    assert rewrite(graph, attention="flash", opset=23).counts["packed_qkv"] == 0
