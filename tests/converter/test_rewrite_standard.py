"""The standard flavour: plain operators give the traced logits."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import rewrite
from kvconv.converter.rewrite.graph import find
from kvconv.errors import RewriteError
from rewrite_graphs import bool_mask, decoder, float_mask
from tolerances import assert_close

CASES: dict[str, dict[str, Any]] = {
    "mha": {"kv_heads": 4},
    "gqa": {},
    "mqa": {"kv_heads": 1},
    "window": {"masks": (bool_mask(window=3),)},
    "chunk": {"masks": (bool_mask(chunk=4),)},
    "-inf": {"masks": (float_mask(-np.inf),)},
    "alibi": {"masks": (graphs.alibi_mask,)},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "unequal widths": {"value_head_dim": 6},
    "two layers": {"masks": (bool_mask(), bool_mask(window=2))},
}


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("case", CASES)
def test_standard_gives_the_traced_logits(case: str, opset: int, tmp_path: Path) -> None:
    graph = decoder(opset=opset, **CASES[case])
    traced = gs.import_onnx(gs.export_onnx(graph))
    report = rewrite(graph, attention="standard", opset=opset)
    assert report.counts["standard"] == len(report.windows)
    assert {node.domain or "" for node in graph.nodes} == {""}
    session = graphs.open_session(graph, tmp_path)
    for past, new in ((0, 5), (7, 1), (6, 4)):
        mask = graphs.make_mask(past, new)
        feeds = graphs.make_feeds(graph, mask, new)
        expected, actual = graphs.run_traced(traced, feeds), graphs.run(session, feeds)
        real = mask[:, past:] != 0
        assert np.isfinite(actual["logits"]).all()
        assert_close(
            actual["logits"][real], expected["logits"][real], "float32", f"past {past}: logits"
        )
        key = names.present_key(0)
        assert_close(actual[key], expected[key], "float32", f"past {past}: {key}")


@pytest.mark.parametrize(
    ("opset", "options", "ops"),
    [
        (23, {}, {"Attention": 1, "Softmax": 0}),
        (18, {}, {"Attention": 0, "Softmax": 1}),
        (23, {"softcap": 2.0}, {"Attention": 0, "Softmax": 1}),
        (23, {"sink": True}, {"Attention": 0, "Softmax": 1}),
    ],
    ids=["23", "18", "softcap", "sink"],
)
def test_standard_uses_the_attention_operator_where_it_means_the_same(
    opset: int, options: dict[str, Any], ops: dict[str, int]
) -> None:
    graph = decoder(opset=opset, **options)
    rewrite(graph, attention="standard", opset=opset)
    assert {op: len(find(graph, op)) for op in ops} == ops


def test_standard_reports_windows() -> None:
    graph = decoder(masks=(bool_mask(window=5), bool_mask(), bool_mask(chunk=4)))
    assert rewrite(graph, attention="standard", opset=23).windows == (5, None, None)


def test_standard_float16_returns_float32_logits(tmp_path: Path) -> None:
    for opset in (18, 23):
        graph = decoder(dtype=np.float16, opset=opset)
        traced = gs.import_onnx(gs.export_onnx(graph))
        rewrite(graph, attention="standard", opset=opset)
        session = graphs.open_session(graph, tmp_path)
        mask = graphs.make_mask(6, 4)
        feeds = graphs.make_feeds(graph, mask, 4)
        expected, actual = graphs.run_traced(traced, feeds), graphs.run(session, feeds)
        real = mask[:, 6:] != 0
        assert actual["logits"].dtype == np.float32
        # bfloat16's tolerance: both sides round every tensor on the way to 11 bits.
        logits = expected["logits"][real].astype(np.float32)
        assert_close(actual["logits"][real], logits, "bfloat16", "logits")


def test_standard_float16_adds_a_float32_mask_as_it_is() -> None:
    def unrounded(b: graphs.Builder) -> gs.Variable:
        """Return MPT's kind of mask: float32 numbers, whatever the model's type."""
        return b.op("Cast", graphs.alibi_mask(b), dtype=np.dtype(np.float32), to=1)

    graph = decoder(dtype=np.float16, masks=(unrounded,))
    rewrite(graph, attention="standard", opset=23)
    (softmax,) = find(graph, "Softmax")
    assert not find(graph, "Attention")
    assert [tensor.dtype for tensor in softmax.inputs[0].inputs[0].inputs] == [np.float32] * 2


def test_standard_twice_changes_nothing() -> None:
    graph = decoder(softcap=2.0)
    rewrite(graph, attention="standard", opset=23)
    once = gs.export_onnx(graph).SerializeToString()
    assert set(rewrite(graph, attention="standard", opset=23).counts.values()) == {0}
    assert gs.export_onnx(graph).SerializeToString() == once


@pytest.mark.parametrize("fault", ["mask", "heads"])
def test_standard_refuses_what_it_cannot_spell(fault: str) -> None:
    graph = decoder()
    (node,) = find(graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    if fault == "mask":
        node.inputs[3] = gs.Variable.empty()
    else:
        node.attrs["kv_num_heads"] = 3
    with pytest.raises(RewriteError, match=r"no mask operand|no multiple of 3") as caught:
        rewrite(graph, attention="standard", opset=23)
    assert (caught.value.expected, caught.value.found) == (1, 0)
