"""Transposes and Reshapes around FlashAttention disappear where nothing else happens there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import RewriteReport, rewrite
from kvconv.converter.rewrite.graph import find
from rewrite_graphs import Builder, Region
from tolerances import assert_close


def build(b: Builder, query: Region) -> gs.Graph:
    """Return a decoder whose queries pass through something on their way."""
    x = b.op("Gather", b.weight(32, 16), b.ids, axis=0, shape=["batch_size", "sequence_length", 16])
    x = graphs.attention_layer(b, x, 0, graphs.bool_mask()(b), query, graphs.rotary("none", b))
    b.output(graphs.lm_head(b, x, "matmul"), names.LOGITS)
    return b.graph


def plain(_b: Builder, x: gs.Variable) -> gs.Variable:
    return x


def norm(b: Builder, x: gs.Variable) -> gs.Variable:
    """Scale the heads, as a norm over queries does."""
    return b.op("Mul", x, b.weight(b.head_dim), shape=x.shape)


def norm_before_transpose(b: Builder, x: gs.Variable) -> gs.Variable:
    """Scale heads while they are [B,S,N,H]."""
    back = b.op("Transpose", x, perm=[0, 2, 1, 3], shape=[x.shape[axis] for axis in (0, 2, 1, 3)])
    return b.op("Transpose", norm(b, back), perm=[0, 2, 1, 3], shape=x.shape)


def cut_and_joined(b: Builder, x: gs.Variable) -> gs.Variable:
    """Split the heads' width and join it again: a detour that changes nothing."""
    parts = [gs.Variable(f"part{i}", x.dtype, [*x.shape[:3], b.head_dim // 2]) for i in range(2)]
    b.graph.nodes.append(gs.Node("Split", "split", {"axis": -1, "num_outputs": 2}, [x], parts))
    return b.op("Concat", *parts, axis=-1, shape=x.shape)


def halves_swapped(b: Builder, x: gs.Variable) -> gs.Variable:
    """Swap the halves of each head: only moves numbers, but not where the op expects them."""
    parts = [gs.Variable(f"part{i}", x.dtype, [*x.shape[:3], b.head_dim // 2]) for i in range(2)]
    b.graph.nodes.append(gs.Node("Split", "split", {"axis": -1, "num_outputs": 2}, [x], parts))
    return b.op("Concat", *reversed(parts), axis=-1, shape=x.shape)


CASES: dict[str, tuple[Region, int, list[str]]] = {
    # name: what queries pass through, operands shortened, nodes from the op up to there
    "plain": (plain, 4, ["MatMul"]),
    "norm": (norm, 3, ["Reshape", "Transpose", "Mul"]),
    "norm before": (norm_before_transpose, 4, ["Reshape", "Mul"]),
    "detour": (cut_and_joined, 4, ["MatMul"]),
    "swapped": (halves_swapped, 3, ["Reshape", "Transpose", "Concat"]),
}


@pytest.mark.parametrize("name", CASES)
def test_heads_shortens_what_only_moves_heads(name: str, tmp_path: Path) -> None:
    through, count, way = CASES[name]
    graph = build(Builder(), through)
    traced = gs.import_onnx(gs.export_onnx(graph))
    report = rewrite(graph, attention="flash", opset=23)
    (node,) = find(graph, names.OP_NAME, names.OP_DOMAIN)
    assert report.counts["heads"] == count
    assert _way(node.inputs[0], len(way)) == way
    session = graphs.open_session(graph, tmp_path)
    mask = graphs.make_mask(6, 4)
    expected = graphs.run_traced(traced, graphs.make_feeds(traced, mask, 4))["logits"]
    actual = graphs.run(session, graphs.make_feeds(graph, mask, 4))["logits"]
    real = mask[:, 6:] != 0
    assert_close(actual[real], expected[real], "float32", "logits")


def _way(tensor: gs.Variable, length: int) -> list[str]:
    ops: list[str] = []
    while len(ops) < length:
        (node,) = tensor.inputs
        ops.append(node.op)
        tensor = node.inputs[0]
    return ops


def test_heads_float16_stops_at_a_norm_in_float32(tmp_path: Path) -> None:
    def norm_in_float32(b: Builder, x: gs.Variable) -> gs.Variable:
        wide = b.op("Cast", x, dtype=np.float32, to=np.float32, shape=x.shape)
        scaled = b.op("Mul", wide, b.const(np.linspace(0.5, 2, b.head_dim), np.float32))
        scaled.shape = x.shape
        return b.op("Cast", scaled, dtype=np.float16, to=np.float16, shape=x.shape)

    graph = build(Builder(dtype=np.float16), norm_in_float32)
    rewrite(graph, attention="flash", opset=23)
    (node,) = find(graph, names.OP_NAME, names.OP_DOMAIN)
    assert [tensor.dtype for tensor in node.inputs[:5]] == [np.float16] * 5
    assert _way(node.inputs[0], 4) == ["Reshape", "Transpose", "Cast", "Mul"]
    session = graphs.open_session(graph, tmp_path)
    logits = graphs.run(session, graphs.make_feeds(graph, graphs.make_mask(6, 4), 4))["logits"]
    assert np.isfinite(logits).all()


def test_heads_without_shapes_changes_nothing() -> None:
    """A Reshape accepts every layout, so an unknown rank must not be guessed from a probe."""
    graph = build(Builder(), norm_before_transpose)
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and tensor not in [*graph.inputs, *graph.outputs]:
            tensor.shape = None
    (placeholder,) = find(graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    assert placeholder.inputs[0].shape is None
    assert rewrite(graph, attention="flash", opset=23).counts["heads"] == 1  # the output


def test_heads_identical_layers_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvconv.converter.rewrite import heads

    calls = []
    check: Callable[..., object] = heads._check
    monkeypatch.setattr(heads, "_check", lambda *args: calls.append(1) or check(*args))

    def report(layers: int) -> RewriteReport:
        calls.clear()
        graph = graphs.decoder(masks=(graphs.bool_mask(),) * layers, kv_heads=4)
        return rewrite(graph, attention="flash", opset=23)

    assert report(1).counts["heads"] == 4
    once = len(calls)
    assert report(6).counts["heads"] == 24
    assert len(calls) == once
