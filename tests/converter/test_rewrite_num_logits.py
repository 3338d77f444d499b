"""num_logits_to_keep: where the slice lands, and that callers can override it."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import restore_overridable, rewrite
from kvconv.converter.rewrite.graph import find
from rewrite_graphs import VOCAB, decoder

MASK = graphs.make_mask(4, 6)


@pytest.mark.parametrize("head", ["matmul", "gemm", "softcap", "odd"])
@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_num_logits_keeps_the_last_positions(head: str, attention: str, tmp_path: Path) -> None:
    graph = decoder(head=head)
    report = rewrite(graph, attention=attention, opset=23)
    assert report.counts["num_logits_to_keep"] == 1
    session = graphs.open_session(graph, tmp_path)
    (overridable,) = session.get_overridable_initializers()
    assert (overridable.name, overridable.shape) == (names.NUM_LOGITS_TO_KEEP, [])
    feeds = graphs.make_feeds(graph, MASK, 6)
    everything = graphs.run(session, feeds)["logits"]
    assert everything.shape == (3, 6, VOCAB)
    for keep in (1, 2, 6):
        few = graphs.run(session, feeds, num_logits_to_keep=np.array(keep))["logits"]
        assert few.shape == (3, keep, VOCAB)
        np.testing.assert_allclose(few, everything[:, -keep:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head", "op"), [("matmul", "MatMul"), ("gemm", "Reshape"), ("softcap", "MatMul")]
)
def test_num_logits_slices_in_front_of_the_head(head: str, op: str) -> None:
    graph = decoder(head=head)
    report = rewrite(graph, attention="flash", opset=23)
    assert report.refusals == ()
    (slicer,) = (n for n in find(graph, "Slice") if (n.inputs[0].shape or [])[-1:] == [16])
    (reader,) = slicer.outputs[0].outputs[:1]
    assert reader.op == op


def test_num_logits_behind_something_unknown_slices_the_logits_and_says_so() -> None:
    graph = decoder(head="odd")
    report = rewrite(graph, attention="flash", opset=23)
    (refusal,) = report.refusals
    assert refusal.rule == "num_logits_to_keep"
    assert "CumSum" in refusal.reason
    assert graph.outputs[0].inputs[0].op == "Slice"


def test_num_logits_is_added_once(tmp_path: Path) -> None:
    graph = decoder()
    rewrite(graph, attention="flash", opset=23)
    nodes = len(graph.nodes)
    assert rewrite(graph, attention="flash", opset=23).counts["num_logits_to_keep"] == 0
    assert len(graph.nodes) == nodes


def test_restore_overridable_lists_the_input_once() -> None:
    zero = onnx.numpy_helper.from_array(np.array(0), names.NUM_LOGITS_TO_KEEP)
    other = onnx.numpy_helper.from_array(np.array(0), "other")
    graph = onnx.helper.make_graph([], "g", [], [], initializer=[zero, other])
    model = onnx.helper.make_model(graph)
    restore_overridable(model)
    restore_overridable(model)
    assert [entry.name for entry in model.graph.input] == [names.NUM_LOGITS_TO_KEEP]
