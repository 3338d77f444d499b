"""Norms of query and key heads behind a packed projection become one node."""

from pathlib import Path
from typing import Any

import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import rewrite
from kvconv.converter.rewrite.graph import find
from tolerances import assert_close


def test_heads_are_normed_in_one_node_with_the_same_numbers(tmp_path: Path) -> None:
    feeds = graphs.make_feeds(graphs.normed_decoder(), graphs.make_mask(4, 5), 5)
    expected = graphs.run_traced(graphs.normed_decoder(), feeds)
    graph = graphs.normed_decoder()
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
    graph = graphs.normed_decoder(**how)
    assert rewrite(graph, attention="flash", opset=23).counts["head_norm"] == 0
    assert find(graph, "RMSNormalization")


def test_gqa_keeps_its_norms() -> None:
    graph = graphs.normed_decoder()
    rewrite(graph, attention="gqa", opset=23, max_sequence_length=32)
    assert len(find(graph, "RMSNormalization")) == 2
    assert not find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
