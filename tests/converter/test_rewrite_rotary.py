"""Rotary embeddings recognised by evaluation, and those that stay in the graph."""

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import RewriteReport, rewrite
from kvconv.converter.rewrite.graph import find
from rewrite_graphs import Builder, Region
from tolerances import assert_close


def build(rotations: list[tuple[Region, Region]], b: Builder) -> gs.Graph:
    """Return a decoder with one layer per pair of query and key rotations."""
    x = b.op("Gather", b.weight(32, 16), b.ids, axis=0, shape=["batch_size", "sequence_length", 16])
    mask = graphs.bool_mask()(b)
    for layer, (query, key) in enumerate(rotations):
        x = graphs.attention_layer(b, x, layer, mask, query, key)
    b.output(graphs.lm_head(b, x, "matmul"), names.LOGITS)
    return b.graph


def rewritten(graph: gs.Graph) -> tuple[list[gs.Node], RewriteReport]:
    report = rewrite(graph, attention="flash", opset=23)
    return find(graph, names.OP_NAME, names.OP_DOMAIN), report


@pytest.mark.parametrize(
    ("style", "interleaved", "rotary_dim"),
    [("half", 0, 0), ("interleaved", 1, 0), ("partial", 0, 4)],
)
def test_rotary_style_becomes_attributes(style: str, interleaved: int, rotary_dim: int) -> None:
    (node,), report = rewritten(graphs.decoder(style=style))
    assert report.counts["rotary"] == 1
    assert node.attrs["rotary_interleaved"] == interleaved
    assert node.attrs["rotary_dim"] == rotary_dim
    assert [tensor.dtype for tensor in node.inputs[6:8]] == [np.float32] * 2


def test_rotary_two_thetas_keep_their_own_tables() -> None:
    b = Builder(layers=3)
    one = graphs.half_rotary(*graphs.tables(b, 8), 8)
    other = graphs.half_rotary(*graphs.tables(b, 8, theta=10000.0), 8)
    nodes, report = rewritten(build([(one, one), (other, other), (one, one)], b))
    assert report.counts["rotary"] == 3
    first, second, third = (node.inputs[6].name for node in nodes)
    assert first == third != second


def swapped(b: Builder) -> tuple[Region, Region]:
    """Take sin for cos."""
    cos, sin = graphs.tables(b, 8)
    region = graphs.half_rotary(sin, cos, 8)
    return region, region


def backwards(b: Builder) -> tuple[Region, Region]:
    """Rotate the other way."""
    cos, sin = graphs.tables(b, 8)
    region = graphs.half_rotary(cos, b.op("Neg", sin), 8)
    return region, region


def mixed_pairs(b: Builder) -> tuple[Region, Region]:
    """Rotate halves by tables that repeat in pairs."""
    region = graphs.half_rotary(*graphs.tables(b, 8, repeat="pairs"), 8)
    return region, region


def no_key(b: Builder) -> tuple[Region, Region]:
    """Rotate queries only."""
    return graphs.rotary("half", b), graphs.rotary("none", b)


def other_key(b: Builder) -> tuple[Region, Region]:
    """Rotate keys by other angles."""
    tables = graphs.tables(b, 8, theta=7.0)
    return graphs.rotary("half", b), graphs.half_rotary(*tables, 8)


def scaled(b: Builder) -> tuple[Region, Region]:
    """Multiply rotated queries by a function of the position, as long-context models do."""
    rotate = graphs.rotary("half", b)
    position = b.op("Cast", b.positions, dtype=np.float32, to=1)
    factor = b.op(
        "Unsqueeze", b.op("Log", b.op("Add", position, b.const(2.0, np.float32))), b.const([1, 3])
    )
    return (lambda b, x: b.op("Mul", rotate(b, x), factor)), rotate


UNKNOWN = {
    # Both rotate: swapped tables rotate by 90 degrees less, the other way; negated ones backwards.
    "swapped": (swapped, 1),
    "backwards": (backwards, 1),
    "mixed pairs": (mixed_pairs, 0),
    "no key": (no_key, 0),
    "other key": (other_key, 0),
    "scaled": (scaled, 0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_rotary_unusual_gives_the_traced_logits(name: str, tmp_path: Path) -> None:
    make, count = UNKNOWN[name]
    b = Builder()
    graph = build([make(b)], b)
    traced = gs.import_onnx(gs.export_onnx(graph))
    (node,), report = rewritten(graph)
    assert report.counts["rotary"] == count
    assert len(report.refusals) == 1 - count
    assert [r.rule for r in report.refusals] == ["rotary"] * (1 - count)
    session = graphs.open_session(graph, tmp_path)
    mask = graphs.make_mask(6, 4)
    expected = graphs.run_traced(traced, graphs.make_feeds(traced, mask, 4))["logits"]
    actual = graphs.run(session, graphs.make_feeds(graph, mask, 4, capacity=16))["logits"]
    real = mask[:, 6:] != 0
    assert_close(actual[real], expected[real], "float32", "logits")
    if not count:
        assert len(node.inputs) == 6


def test_rotary_refusals_say_why() -> None:
    reasons = {}
    for name in ("mixed pairs", "no key", "other key"):
        b = Builder()
        graph = build([UNKNOWN[name][0](b)], b)
        reasons[name] = rewritten(graph)[1].refusals[0].reason
    assert "not rotated by cos and sin in a known style" in reasons["mixed pairs"]
    assert reasons["no key"] == "only one of query and key is rotated"
    assert "different tables" in reasons["other key"]


@pytest.mark.parametrize(
    ("width", "count"), [(4, 1), (8, 0)], ids=["every value once", "every value twice"]
)
def test_rotary_tables_in_the_weights_file_are_fused_whatever_they_hold(
    width: int, count: int
) -> None:
    """GPT-J looks sin and cos up in a table, which may be large and is not loaded.

    That two halves of a table are equal could be known from its numbers only.
    """

    def looked_up(b: Builder, name: str) -> gs.Variable:
        proto = onnx.helper.make_tensor(name, 1, [128, width], np.zeros(128 * width, np.float32))
        proto.data_location = onnx.TensorProto.EXTERNAL
        table = gs.Constant(name, gs.ir.tensor.LazyValues(proto), data_location=1)
        rows = b.op("Unsqueeze", b.op("Gather", table, b.positions, axis=0), b.const([1]))
        return b.op("Concat", *[rows] * (8 // width), axis=-1)

    b = Builder()
    region = graphs.half_rotary(looked_up(b, "cos_table"), looked_up(b, "sin_table"), 8)
    (node,), report = rewritten(build([(region, region)], b))
    assert report.counts["rotary"] == count
    assert ("in a known style" in str(report.refusals)) == (count == 0)
    assert len(node.inputs) == (8 if count else 6)


def test_rotary_absent_is_no_refusal() -> None:
    _, report = rewritten(graphs.decoder(style="none"))
    assert (report.counts["rotary"], report.refusals) == (0, ())


def test_rotary_identical_layers_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvconv.converter.rewrite import rotary

    calls = []
    check = rotary._check
    monkeypatch.setattr(rotary, "_check", lambda *args: calls.append(1) or check(*args))
    b = Builder(layers=4, kv_heads=4)
    region = graphs.rotary("half", b)
    _, report = rewritten(build([(region, region)] * 4, b))
    assert report.counts["rotary"] == 4
    assert len(calls) == 1
