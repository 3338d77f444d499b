"""Windowed layers become rings where the op's own window says that nothing else is seen."""

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import RewriteReport, read_graph, rewrite, write_graph
from kvconv.converter.rewrite.graph import find, get_operand
from kvconv.manifest import RING_SLACK, ring_capacity
from rewrite_graphs import bool_mask
from tolerances import assert_close

WINDOW = 3
CAPACITY = WINDOW + RING_SLACK
MASKS = (bool_mask(window=WINDOW), bool_mask(), bool_mask(window=WINDOW))


def rewritten(
    length: int | None = 1000, *masks: graphs.Mask, **options: object
) -> tuple[gs.Graph, list[gs.Node], RewriteReport]:
    masks = masks or MASKS
    windows = [WINDOW if mask in (MASKS[0], MASKS[2]) else 0 for mask in masks]
    graph = graphs.decoder(masks=masks, windows=windows)
    report = rewrite(graph, attention="flash", opset=23, max_sequence_length=length, **options)
    return graph, find(graph, names.OP_NAME, names.OP_DOMAIN), report


def test_windowed_layers_become_rings_and_all_layers_read_the_length() -> None:
    graph, nodes, report = rewritten()
    assert report.counts["ring"] == 2
    assert report.ring_capacities == (CAPACITY, None, CAPACITY)
    assert [node.attrs.get("cache_mode", "auto") for node in nodes] == ["ring", "auto", "ring"]
    (length,) = (tensor for tensor in graph.inputs if tensor.name == names.PAST_SEQUENCE_LENGTH)
    assert (length.dtype, length.shape) == (np.int32, [1])
    assert all(get_operand(node, "past_sequence_length") is length for node in nodes)
    (note,) = report.refusals
    assert "2 of 3 layers" in note.reason
    assert "--no-ring" in note.reason


def test_dimensions_of_rings_are_not_those_of_whole_caches(tmp_path: Path) -> None:
    graph, _, _ = rewritten()
    write_graph(graph, tmp_path / "model.onnx")
    written = onnx.load(tmp_path / "model.onnx").graph
    slots = {
        value.name: value.type.tensor_type.shape.dim[2].dim_param
        for value in (*written.input, *written.output)
        if "key_values" in value.name or "present" in value.name
    }
    for layer, expected in enumerate(
        [f"ring_capacity_{CAPACITY}", "", f"ring_capacity_{CAPACITY}"]
    ):
        for name in (names.past_key, names.past_value, names.present_key, names.present_value):
            found = slots[name(layer)]
            assert found == expected if expected else "ring" not in found


def test_graph_with_rings_gives_the_traced_logits_until_and_after_it_wraps(tmp_path: Path) -> None:
    traced = graphs.decoder(masks=MASKS)
    graph, _, _ = rewritten()
    session = graphs.open_session(graph, tmp_path)
    total, new = 2 * CAPACITY + 10, 4
    padding = graphs.make_mask(total - new, new)
    expected = graphs.run_traced(traced, graphs.make_feeds(traced, padding, new))["logits"]
    feeds = graphs.make_feeds(graph, padding, new, capacity=total + 5)
    past = np.arange(total - new - CAPACITY, total - new)
    for name in (
        name for layer in (0, 2) for name in (names.past_key(layer), names.past_value(layer))
    ):
        ring = np.empty_like(feeds[name][:, :, :CAPACITY])
        ring[:, :, past % CAPACITY] = feeds[name][:, :, past]
        feeds[name] = ring
    feeds[names.PAST_SEQUENCE_LENGTH] = np.array([total - new], np.int32)
    actual = graphs.run(session, feeds)["logits"]
    real = padding[:, total - new :] != 0
    assert_close(actual[real], expected[real], "float32", "logits")


@pytest.mark.parametrize(
    ("length", "expected"), [(None, None), (CAPACITY, None), (CAPACITY + 1, CAPACITY)]
)
def test_ring_that_would_save_nothing_is_none(length: int | None, expected: int | None) -> None:
    graph, nodes, report = rewritten(length, MASKS[0])
    assert report.ring_capacities == (expected,)
    assert ("cache_mode" in nodes[0].attrs) == (expected is not None)
    has_input = any(tensor.name == names.PAST_SEQUENCE_LENGTH for tensor in graph.inputs)
    assert has_input == (expected is not None)


def test_ring_capacity_without_a_limit_is_always_worth_it() -> None:
    assert ring_capacity(512, None) == 768
    assert ring_capacity(None, 4096) is None


def test_window_that_stays_a_bias_makes_no_ring() -> None:
    graph, nodes, report = rewritten(1000, *MASKS, without={"mask"})
    assert report.counts["ring"] == 0
    assert all(get_operand(node, "past_sequence_length") is None for node in nodes)


def test_rule_left_out_makes_no_ring() -> None:
    _, _, report = rewritten(1000, *MASKS, without={"ring"})
    assert report.ring_capacities == (None, None, None)
    assert report.windows == (WINDOW, None, WINDOW)
    assert report.refusals == ()


def test_rings_are_rewritten_once_and_need_version_3(tmp_path: Path) -> None:
    graph, _, _ = rewritten()
    write_graph(graph, tmp_path / "once.onnx")
    again = read_graph(tmp_path / "once.onnx")
    report = rewrite(again, attention="flash", opset=23, max_sequence_length=1000)
    assert report.counts["ring"] == 0
    assert report.ring_capacities == (CAPACITY, None, CAPACITY)
    write_graph(again, tmp_path / "twice.onnx")
    once, twice = (onnx.load(tmp_path / f"{name}.onnx") for name in ("once", "twice"))
    assert once.graph == twice.graph
    versions = {entry.domain: entry.version for entry in once.opset_import}
    assert versions[names.OP_DOMAIN] == names.RING_OP_VERSION == 3
