"""Graphs for CUDA take the length of the cache, and masks wider than it."""

from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import RewriteReport, host_nodes, rewrite
from kvconv.converter.rewrite.graph import find, get_operand
from kvconv.errors import RewriteError
from rewrite_graphs import bool_mask
from tolerances import assert_close

WINDOW = 3
MASKS = (bool_mask(window=WINDOW), bool_mask())


def rewritten(graph: gs.Graph, **options: object) -> tuple[list[gs.Node], RewriteReport]:
    report = rewrite(graph, attention="flash", opset=23, provider="cuda", **options)
    return find(graph, names.OP_NAME, names.OP_DOMAIN), report


@pytest.mark.parametrize("length", [None, 1000], ids=["no ring", "ring"])
def test_every_layer_reads_the_length_and_the_note_says_who_cannot_give_it(
    length: int | None,
) -> None:
    graph = graphs.decoder(masks=MASKS, windows=(WINDOW, 0))
    nodes, report = rewritten(graph, max_sequence_length=length)
    assert (report.counts["ring"], report.counts["length_input"]) == ((1, 0) if length else (0, 2))
    (given,) = (tensor for tensor in graph.inputs if tensor.name == names.PAST_SEQUENCE_LENGTH)
    assert (given.dtype, given.shape) == (np.int32, [1])
    assert all(get_operand(node, "past_sequence_length") is given for node in nodes)
    assert any("optimum and onnxruntime-genai" in str(note) for note in report.refusals)


def test_twice_changes_nothing() -> None:
    graph = graphs.decoder(masks=MASKS, windows=(WINDOW, 0))
    rewritten(graph)
    once = gs.export_onnx(graph).SerializeToString()
    _, report = rewritten(graph)
    assert report.counts["length_input"] == 0
    assert gs.export_onnx(graph).SerializeToString() == once


def test_graph_for_the_cpu_has_no_such_input() -> None:
    graph = graphs.decoder(masks=(bool_mask(),))
    report = rewrite(graph, attention="flash", opset=23)
    assert report.counts["length_input"] == 0
    assert names.PAST_SEQUENCE_LENGTH not in {tensor.name for tensor in graph.inputs}


def test_mask_as_wide_as_the_capacity_gives_the_traced_logits(tmp_path: Path) -> None:
    past, new, capacity = 6, 2, 20
    traced = graphs.decoder(masks=(bool_mask(),))
    graph = graphs.decoder(masks=(bool_mask(),))
    rewritten(graph)
    padding = graphs.make_mask(past, new)
    expected = graphs.run_traced(traced, graphs.make_feeds(traced, padding, new))["logits"]
    feeds = graphs.make_feeds(graph, padding, new, capacity=capacity)
    wide = np.ones((padding.shape[0], capacity), np.int64)
    wide[:, : past + new] = padding
    feeds[names.ATTENTION_MASK] = wide
    feeds[names.PAST_SEQUENCE_LENGTH] = np.array([past], np.int32)
    actual = graphs.run(graphs.open_session(graph, tmp_path), feeds)["logits"]
    real = padding[:, past:] != 0
    assert_close(actual[real], expected[real], "float32", "logits")


def test_mask_that_stays_a_bias_is_refused() -> None:
    graph = graphs.decoder(masks=(bool_mask(chunk=4),))
    with pytest.raises(RewriteError, match="attention_mask, whose width it takes") as caught:
        rewritten(graph)
    assert caught.value.found > 0


def test_steps_can_be_captured_because_the_start_of_the_slice_stays_on_the_host() -> None:
    graph = graphs.decoder(masks=(bool_mask(),))
    _, report = rewritten(graph)
    assert not [note for note in report.refusals if note.rule == "host_nodes"]
    starts = [node.inputs[1].inputs[0] for node in find(graph, "Slice") if node.inputs[1].inputs]
    (start,) = (node for node in starts if node.op == "Sub")
    assert start.inputs[0].inputs[0].inputs[0].inputs[0].op == "Shape"


def test_tensor_that_would_move_is_named() -> None:
    graph = graphs.decoder(masks=(bool_mask(),))
    rewrite(graph, attention="flash", opset=23)  # with Neg and Reshape, which run on the device
    (note,) = host_nodes.check(graph)
    assert "Slice reads" in note.reason
    assert "computed on the device" in note.reason
    assert "--no-cuda-graph" in note.reason
