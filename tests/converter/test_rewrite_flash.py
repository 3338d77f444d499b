"""The flash flavour as a whole, and the rule that makes FlashAttention nodes."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from kvconv import names
from kvconv.converter.rewrite import OPTIONAL_RULES, RewriteReport, rewrite
from kvconv.converter.rewrite.graph import find
from kvconv.errors import RewriteError
from rewrite_graphs import (
    Builder,
    Mask,
    attention_layer,
    bool_mask,
    decoder,
    float_mask,
    lm_head,
    make_feeds,
    make_mask,
    open_session,
    rotary,
    run,
    run_traced,
)
from tolerances import assert_close

LOWEST = float(np.finfo(np.float32).min)


def flash_nodes(graph: gs.Graph) -> list[gs.Node]:
    return find(graph, names.OP_NAME, names.OP_DOMAIN)


def assert_same_logits(
    graph: gs.Graph, folder: Path, dtype: str = "float32", *, without: Collection[str] = ()
) -> RewriteReport:
    """Compare logits and caches before and after rewriting, in both cache modes.

    Args:
        graph: As traced; rewritten here.
        folder: Where to write the model.
        dtype: Key of the tolerance. For float16 graphs that is bfloat16's: both sides round every
            tensor on the way to 11 bits, and a logit is the sum of several.
        without: Rules to leave out.
    """
    traced = gs.import_onnx(gs.export_onnx(graph))
    report = rewrite(graph, attention="flash", opset=graph.opset, without=without)
    session = open_session(graph, folder)
    for past, new in ((0, 5), (7, 1), (6, 4)):
        mask = make_mask(past, new)
        expected = run_traced(traced, make_feeds(traced, mask, new))
        for capacity in (0, past + new + 3):
            feeds = make_feeds(graph, mask, new, capacity=capacity)
            actual = run(session, feeds)
            where = f"past {past}, new {new}, capacity {capacity}: "
            real = mask[:, past:] != 0  # a padding query's logits are nobody's
            logits, wanted = actual[names.LOGITS], expected[names.LOGITS]
            assert logits.dtype == np.float32
            assert np.isfinite(logits).all()
            assert_close(logits[real], wanted[real].astype(np.float32), dtype, where + "logits")
            for name in (names.present_key(0), names.present_value(0)):
                assert actual[name].shape[2] == (capacity or past + new)
                assert_close(actual[name][:, :, : past + new], expected[name], dtype, where + name)
    return report


@pytest.mark.parametrize("style", ["half", "partial", "interleaved", "none"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_rewrite_flash_gives_the_traced_logits(
    style: str, heads: tuple[int, int], tmp_path: Path
) -> None:
    graph = decoder(style=style, heads=heads[0], kv_heads=heads[1])
    assert_same_logits(graph, tmp_path)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (bool_mask(), 0),
        (bool_mask(window=3), 3),
        (bool_mask(chunk=4), None),
        (float_mask(LOWEST), 0),
        (float_mask(-np.inf, window=2), 2),
    ],
    ids=["causal", "window", "chunk", "float", "float window"],
)
def test_rewrite_flash_masks_give_the_traced_logits(
    mask: Mask, window: int | None, tmp_path: Path
) -> None:
    graph = decoder(masks=(mask,))
    assert_same_logits(graph, tmp_path)
    (node,) = flash_nodes(graph)
    assert node.attrs["causal"] == (window is not None)
    assert node.attrs["window_size"] == (window or 0)


@pytest.mark.parametrize(
    "options", [{"softcap": 1.5}, {"sink": True}, {"value_head_dim": 6}], ids=str
)
def test_rewrite_flash_keeps_what_the_attention_call_said(
    options: dict[str, float], tmp_path: Path
) -> None:
    assert_same_logits(decoder(**options), tmp_path)


def test_rewrite_flash_float16_returns_float32_logits(tmp_path: Path) -> None:
    graph = decoder(dtype=np.float16)
    assert_same_logits(graph, tmp_path, "bfloat16")
    (node,) = flash_nodes(graph)
    assert [node.inputs[i].dtype for i in (6, 7)] == [np.float32, np.float32]


def test_rewrite_flash_reads_projections_and_nothing_else() -> None:
    graph = decoder(masks=(bool_mask(), bool_mask(window=3)), windows=(0, 3))
    report = rewrite(graph, attention="flash", opset=23)
    assert report.refusals == ()
    assert report.windows == (None, 3)
    assert report.counts == {
        "tidy": report.counts["tidy"], "past_length": 1, "eager": 0, "flash": 2, "mask": 2,
        "norm": 0, "rotary": 2, "heads": 8, "scale": 0, "ring": 0, "length_input": 0,
        "head_norm": 0, "balance_heads": 0, "packed_qkv": 0, "stored_cache": 0, "gated": 0,
        "skip_norm": 0, "num_logits_to_keep": 1, "float32_logits": 0,
    }  # fmt: skip
    for node in flash_nodes(graph):
        assert [tensor.inputs[0].op for tensor in node.inputs[:3]] == ["MatMul"] * 3
        assert node.inputs[5].name == names.ATTENTION_MASK
        assert node.outputs[0].outputs[0].op == "MatMul"
    first, second = (node.inputs[6:8] for node in flash_nodes(graph))
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True]


def test_rewrite_flash_twice_changes_nothing() -> None:
    graph = decoder(masks=(bool_mask(), bool_mask(chunk=4)), style="partial")
    rewrite(graph, attention="flash", opset=23)
    once = gs.export_onnx(graph).SerializeToString()
    report = rewrite(graph, attention="flash", opset=23)
    assert set(report.counts.values()) == {0}
    assert gs.export_onnx(graph).SerializeToString() == once


def layer(*, masked: bool = True) -> tuple[Builder, gs.Node]:
    """Return a one-layer decoder still being built, and its placeholder."""
    b = Builder()
    x = b.op("Gather", b.weight(32, 16), b.ids, axis=0, shape=["batch_size", "sequence_length", 16])
    x = attention_layer(b, x, 0, bool_mask()(b) if masked else None, rotary("none", b))
    b.output(lm_head(b, x, "matmul"), names.LOGITS)
    (node,) = find(b.graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    return b, node


def assert_refused(b: Builder, reason: str) -> None:
    with pytest.raises(RewriteError, match=reason) as caught:
        rewrite(b.graph, attention="flash", opset=23)
    assert (caught.value.expected, caught.value.found) == (1, 0)
    assert len(caught.value.refusals) == 1


def test_flash_without_mask_is_refused() -> None:
    b, _ = layer(masked=False)
    assert_refused(b, "no mask operand")


def test_flash_with_uneven_heads_is_refused() -> None:
    b, node = layer()
    node.attrs["kv_num_heads"] = 3
    assert_refused(b, "4 query heads are no multiple of 3 key/value heads")


def test_flash_with_keys_that_are_no_cache_is_refused() -> None:
    b, node = layer()
    node.inputs[1] = node.inputs[1].inputs[0].inputs[1]
    assert_refused(b, r"is not Concat\(past, new\)")


def test_flash_with_another_layers_cache_is_refused() -> None:
    b, node = layer()
    node.attrs["layer_index"] = 1
    assert_refused(b, r"appends to past_key_values.0.key, not to past_key_values.1.key")


def test_flash_with_a_cache_that_is_no_output_is_refused() -> None:
    b, _ = layer()
    b.graph.outputs = [t for t in b.graph.outputs if t.name != names.present_value(0)]
    assert_refused(b, "is not the graph output present.0.value")


def test_flash_with_a_cache_read_elsewhere_is_refused() -> None:
    b, node = layer()
    b.output(b.op("ReduceMax", node.inputs[1]), "extra")
    assert_refused(b, "present.0.key is read by other nodes")


def test_cache_use_outside_attention_is_refused() -> None:
    b, _ = layer()
    b.output(b.op("ReduceMax", b.past[0][0]), "extra")
    with pytest.raises(RewriteError, match=r"it reads past_key_values\.0\.key") as caught:
        rewrite(b.graph, attention="flash", opset=23)
    assert (caught.value.expected, caught.value.found) == (1, 1)


@pytest.mark.parametrize("rule", sorted(OPTIONAL_RULES))
def test_graph_without_an_optional_rule_gives_the_traced_logits(rule: str, tmp_path: Path) -> None:
    report = assert_same_logits(decoder(), tmp_path, without=[rule])
    assert report.counts[rule] == 0


def test_rule_left_out_finds_its_work_later() -> None:
    graph, whole = decoder(), decoder()
    counts = rewrite(graph, attention="flash", opset=23, without=OPTIONAL_RULES).counts
    again = rewrite(graph, attention="flash", opset=23).counts
    expected = rewrite(whole, attention="flash", opset=23).counts
    assert {rule: counts[rule] for rule in OPTIONAL_RULES} == dict.fromkeys(OPTIONAL_RULES, 0)
    assert {rule: again[rule] for rule in OPTIONAL_RULES} == {
        rule: expected[rule] for rule in OPTIONAL_RULES
    }
    assert any(again[rule] for rule in OPTIONAL_RULES)
    assert [node.op for node in graph.nodes] == [node.op for node in whole.nodes]


def test_rule_that_a_graph_needs_is_not_left_out() -> None:
    with pytest.raises(ValueError, match="'flash'.*it may hold.*'skip_norm'"):
        rewrite(decoder(), attention="flash", opset=23, without=["flash"])


def test_rewrite_without_attention_is_refused() -> None:
    b = Builder()
    x = b.op("Gather", b.weight(32, 16), b.ids, axis=0)
    b.output(lm_head(b, b.op("Neg", x, shape=["b", "s", 16]), "matmul"), names.LOGITS)
    with pytest.raises(RewriteError, match=r"past_key_values\.0\.key is not what one Concat"):
        rewrite(b.graph, attention="flash", opset=23)
    b.graph.inputs = [t for t in b.graph.inputs if t.name == names.INPUT_IDS]
    with pytest.raises(RewriteError, match="no attention to rewrite"):
        rewrite(b.graph, attention="flash", opset=23)


def test_rewrite_of_another_opset_is_refused() -> None:
    with pytest.raises(ValueError, match="opset 18, not 23"):
        rewrite(decoder(opset=18), attention="flash", opset=23)
