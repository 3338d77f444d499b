"""Masks recognised by evaluation, and those that must stay a bias."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import RewriteReport, mask, past_length, rewrite, tidy
from kvconv.converter.rewrite.graph import Editor, find
from rewrite_graphs import Builder, Mask, alibi_mask, bool_mask, decoder, float_mask
from tolerances import assert_close

LOWEST = float(np.finfo(np.float32).min)


def recognise(build: Mask, **sizes: object) -> mask.Visibility | str:
    """Recognise a mask after the rules that go before."""
    graph = decoder(masks=(build,), **sizes)
    editor = Editor(graph)
    tidy.apply(editor)
    past_length.apply(editor)
    (node,) = find(graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    return mask.recognise(graph, node.inputs[3])


@pytest.mark.parametrize("window", [1, 2, 3, 17, 512, 4096, 32768])
def test_recognise_window_is_found_without_a_hint(window: int) -> None:
    assert recognise(bool_mask(window=window)) == mask.Visibility(True, window)


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (bool_mask(), np.float32),
        (float_mask(LOWEST), np.float32),
        (float_mask(-np.inf), np.float32),
        (float_mask(-1e9), np.float32),
        (float_mask(float(np.finfo(np.float16).min)), np.float16),
    ],
    ids=["bool", "lowest", "-inf", "-1e9", "float16"],
)
def test_recognise_causal_in_every_spelling(build: Mask, dtype: type) -> None:
    assert recognise(build, dtype=dtype) == mask.Visibility(True)


def test_recognise_padding_alone_is_not_causal() -> None:
    assert recognise(graphs.padding) == mask.Visibility(False)


def test_recognise_alibi_finds_the_slopes() -> None:
    assert recognise(alibi_mask) == mask.Visibility(True, None, (1.0, 0.5, 0.25, 0.125))


def test_recognise_alibi_of_attended_slots_says_so() -> None:
    assert recognise(cumulative_alibi) == mask.Visibility(True, None, (1.0,), counts_attended=True)


def test_recognise_alibi_in_float16_to_its_precision() -> None:
    answer = recognise(alibi_mask, dtype=np.float16)
    assert answer == mask.Visibility(True, None, (1.0, 0.5, 0.25, 0.125))


def test_recognise_alibi_that_is_rounded_at_the_end_only() -> None:
    def narrowed(b: Builder) -> gs.Variable:
        """Add numbers below float16's range to whole rows, as MPT's slot - last slot does."""
        model, b.dtype = b.dtype, np.dtype(np.float32)
        far = b.const(2.0**17, np.float32)
        numbers = b.op("Sub", alibi_mask(b), far, dtype=b.dtype, shape=[2, 4, None, None])
        return b.op("Cast", numbers, dtype=model, to=model.type)

    answer = recognise(narrowed, dtype=np.float16)
    assert isinstance(answer, mask.Visibility)
    assert answer.slopes == (1.0, 0.5, 0.25, 0.125)


def test_recognise_float_that_is_cast_to_bool_is_read_as_bool() -> None:
    def cast(b: Builder) -> gs.Variable:
        """Say 1 for what is seen and 0 for what is not."""
        numbers = b.op("Cast", bool_mask()(b), dtype=np.float32, to=onnx.TensorProto.FLOAT)
        return b.op("Cast", numbers, dtype=bool, to=onnx.TensorProto.BOOL, shape=["b", 1, "s", "t"])

    assert recognise(cast) == mask.Visibility(True)


def test_recognise_infinite_bonus_is_no_mask() -> None:
    def bonus(b: Builder) -> gs.Variable:
        infinite = b.const(np.inf, np.float32)
        return b.op("Where", bool_mask()(b), infinite, b.const(LOWEST, np.float32), dtype=b.dtype)

    assert recognise(bonus) == "it adds numbers to the scores of slots that are seen"


def chunk_over_padding(b: Builder) -> gs.Variable:
    """Attend to the own chunk of four slots."""
    return bool_mask(chunk=4)(b)


def no_padding(b: Builder) -> gs.Variable:
    return b.op("Unsqueeze", graphs.seen(b), b.const([0, 1]), shape=[1, 1, "s", "t"])


def first_slot_always(b: Builder) -> gs.Variable:
    """Attend to slot 0 even when it is padding."""
    _, column = graphs.slots(b)
    return b.op("Or", bool_mask()(b), b.op("Equal", column, b.const(0), dtype=bool))


def window_with_sink_tokens(b: Builder) -> gs.Variable:
    """Attend to a window and to the first two slots."""
    _, column = graphs.slots(b)
    kept = b.op("And", b.op("Less", column, b.const(2), dtype=bool), bool_mask()(b))
    return b.op("Or", bool_mask(window=6)(b), kept)


def weak(b: Builder) -> gs.Variable:
    """Add -3 to masked slots, which does not mask them."""
    return float_mask(-3.0)(b)


def cumulative_alibi(b: Builder) -> gs.Variable:
    """Add the number of seen slots so far, as BLOOM does: other than the slot beyond a hole."""
    position = b.op("Cast", b.op("CumSum", b.mask, b.const(1)), dtype=np.float32, to=1)
    bias = b.op("Unsqueeze", position, b.const([1, 2]))
    return b.op("Add", float_mask(LOWEST)(b), bias, shape=["b", 1, "s", "t"])


def rounded_alibi(b: Builder) -> gs.Variable:
    """Add slots rounded to 8 bits, as arithmetic in bfloat16 does."""
    _, column = graphs.slots(b)
    rounded = b.op("Cast", column, dtype=np.float32, to=onnx.TensorProto.BFLOAT16)
    bias = b.op("Cast", rounded, dtype=np.float32, to=onnx.TensorProto.FLOAT)
    return b.op("Add", float_mask(LOWEST)(b), bias, shape=["b", 1, "s", "t"])


def one_head_windowed(b: Builder) -> gs.Variable:
    """Let the last head see a window, too long for short probes to notice."""
    masks = [bool_mask()(b) for _ in range(b.heads - 1)] + [bool_mask(window=100)(b)]
    return b.op("Concat", *masks, axis=1, shape=["b", b.heads, "s", "t"])


def of_another_input(b: Builder) -> gs.Variable:
    """Mask by token types, which no probe can supply."""
    types = gs.Variable("token_type_ids", np.dtype(np.int64), ["b", "t"])
    b.graph.inputs.append(types)
    keep = b.op("Cast", types, dtype=bool, to=onnx.TensorProto.BOOL)
    return b.op("And", bool_mask()(b), b.op("Unsqueeze", keep, b.const([1, 2])))


def per_query(b: Builder, condition: gs.Variable) -> gs.Variable:
    """Attend to the own slot only where a condition [B,S] holds, to all before elsewhere."""
    row, column = graphs.slots(b)
    own = b.op("Equal", column, row, dtype=bool)
    free = b.op("Unsqueeze", b.op("Not", condition), b.const([1, 3]))
    return b.op("And", bool_mask()(b), b.op("Or", free, own), shape=["b", 1, "s", "t"])


def of_token_ids(b: Builder) -> gs.Variable:
    """Let token 5 see itself only: with any other token the mask is plainly causal."""
    return per_query(b, b.op("Equal", b.ids, b.const(5), dtype=bool))


def of_embeddings(b: Builder) -> gs.Variable:
    """Mask by the embedding of a token, from a table small enough to lie in the graph."""
    table = b.const(np.arange(graphs.VOCAB) == 5, np.float32)
    return per_query(b, b.op("Cast", b.op("Gather", table, b.ids, axis=0), dtype=bool, to=9))


def of_position_ids(b: Builder) -> gs.Variable:
    """Mask where positions lag behind the count of seen slots, as in packed sequences."""
    count = b.op("Sub", b.op("CumSum", b.mask, b.const(1)), b.const(1))
    new = b.op("Unsqueeze", b.op("Neg", b.length(b.ids, 1)), b.const([0]))
    last = b.op("Slice", count, new, b.const([2**62]), b.const([1]))
    return per_query(b, b.op("Less", b.positions, last, dtype=bool))


def of_the_shape_of_ids(b: Builder) -> gs.Variable:
    """Say causal with sums of shapes of ids, which mean the same whatever the ids."""
    new = [b.length(tensor, 1) for tensor in (b.ids, b.positions)]
    zero = b.op("Sub", *new, shape=[])
    row, column = graphs.slots(b)
    seen = b.op("LessOrEqual", column, b.op("Add", row, zero), dtype=bool)
    return b.op("And", seen, graphs.padding(b), shape=["b", 1, "s", "t"])


def test_recognise_shape_of_ids_is_no_dependence_on_ids() -> None:
    assert recognise(of_the_shape_of_ids) == mask.Visibility(True)


@pytest.mark.parametrize("past", [0, 6])
def test_mask_of_position_ids_follows_positions_that_no_mask_implies(
    past: int, tmp_path: Path
) -> None:
    traced = decoder(masks=(of_position_ids,))
    graph, _, _ = rewritten(of_position_ids)
    session = graphs.open_session(graph, tmp_path)
    padding = np.ones((2, past + 4), np.int64)
    packed = np.array([[0, 1, 0, 1], [past, past + 1, past + 2, past + 3]])
    position_ids = {names.POSITION_IDS: packed}
    feeds = graphs.make_feeds(traced, padding, 4) | position_ids
    expected = graphs.run_traced(traced, feeds)["logits"]
    plain = graphs.run_traced(decoder(), feeds)["logits"]
    assert np.abs(plain - expected).max() > 1e-2
    actual = graphs.run(session, graphs.make_feeds(graph, padding, 4) | position_ids)["logits"]
    assert_close(actual, expected, "float32", "logits")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (chunk_over_padding, "would not say"),
        (no_padding, "sees slot .*, which Visibility"),
        (first_slot_always, "sees slot 0"),
        (window_with_sink_tokens, "would not say"),
        (weak, "would not say"),
        (rounded_alibi, "adds numbers"),
        (one_head_windowed, "heads see different slots"),
        (of_another_input, "depends on the input token_type_ids"),
        (of_token_ids, "^it depends on the token ids$"),
        (of_embeddings, "^it depends on the token ids$"),
        (of_position_ids, "^it depends on the position ids$"),
        (lambda b: b.op("Squeeze", bool_mask()(b), b.const([1])), "its shape is"),
    ],
    ids=[
        "chunk",
        "no padding",
        "first slot",
        "sink tokens",
        "weak",
        "rounded",
        "one head",
        "another input",
        "token ids",
        "embeddings",
        "position ids",
        "rank 3",
    ],
)
def test_recognise_odd_mask_says_why_not(build: Mask, reason: str) -> None:
    answer = recognise(build)
    assert isinstance(answer, str)
    assert re.search(reason, answer)


def test_recognise_mask_of_weights_is_refused() -> None:
    def learned(b: Builder) -> gs.Variable:
        weight = b.const(0.5, np.float32)
        proto = onnx.helper.make_tensor("learned", 1, [1], np.zeros(1, np.float32))
        proto.data_location = onnx.TensorProto.EXTERNAL
        weight = gs.Constant("learned", gs.ir.tensor.LazyValues(proto), data_location=1)
        return b.op("Add", float_mask(LOWEST)(b), weight, shape=["b", 1, "s", "t"])

    assert recognise(learned) == "it depends on the weight learned"


def test_recognise_mask_of_cached_values_is_refused() -> None:
    def content(b: Builder) -> gs.Variable:
        peak = b.op("ReduceMax", b.past[0][0], keepdims=0, shape=[])
        return b.op("Add", float_mask(LOWEST)(b), peak, shape=["b", 1, "s", "t"])

    assert recognise(content) == "it depends on past_key_values.0.key"


def rewritten(*masks: Mask, **sizes: object) -> tuple[gs.Graph, list[gs.Node], RewriteReport]:
    graph = decoder(masks=masks, **sizes)
    report = rewrite(graph, attention="flash", opset=23)
    return graph, find(graph, names.OP_NAME, names.OP_DOMAIN), report


@pytest.mark.parametrize(
    "build",
    [
        chunk_over_padding,
        first_slot_always,
        window_with_sink_tokens,
        of_token_ids,
        of_embeddings,
        of_position_ids,
    ],
)
def test_mask_unrecognised_stays_a_bias_and_gives_the_traced_logits(
    build: Mask, tmp_path: Path
) -> None:
    traced = decoder(masks=(build,))
    graph, (node,), report = rewritten(build)
    assert report.counts["mask"] == 0
    (refusal,) = report.refusals
    assert (refusal.rule, refusal.node) == ("mask", node.name)
    assert node.attrs["causal"] == 0
    session = graphs.open_session(graph, tmp_path)
    for past, new in ((0, 6), (9, 3)):
        padding = graphs.make_mask(past, new)
        expected = graphs.run_traced(traced, graphs.make_feeds(traced, padding, new))["logits"]
        for capacity in (0, 20):
            feeds = graphs.make_feeds(graph, padding, new, capacity=capacity)
            actual = graphs.run(session, feeds)["logits"]
            real = padding[:, past:] != 0
            assert_close(actual[real], expected[real], "float32", f"past {past}: logits")


def test_mask_alibi_becomes_slopes_and_gives_the_traced_logits(tmp_path: Path) -> None:
    traced = decoder(masks=(alibi_mask,))
    graph, (node,), report = rewritten(alibi_mask)
    assert report.counts["mask"] == 1
    assert node.inputs[9].values.tolist() == [1.0, 0.5, 0.25, 0.125]
    session = graphs.open_session(graph, tmp_path)
    padding = graphs.make_mask(6, 4)
    expected = graphs.run_traced(traced, graphs.make_feeds(traced, padding, 4))["logits"]
    actual = graphs.run(session, graphs.make_feeds(graph, padding, 4, capacity=12))["logits"]
    real = padding[:, 6:] != 0
    assert_close(actual[real], expected[real], "float32", "logits")


def test_mask_alibi_with_a_sink_stays_a_bias() -> None:
    _, (node,), report = rewritten(alibi_mask, sink=True)
    assert report.counts["mask"] == 0
    assert "head sink" in report.refusals[0].reason
    assert not node.inputs[8].is_empty()


def test_mask_shared_by_layers_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    recognise = mask.recognise
    monkeypatch.setattr(mask, "recognise", lambda *args: calls.append(1) or recognise(*args))
    _, _, report = rewritten(bool_mask(), bool_mask(window=3), bool_mask(), bool_mask(window=3))
    assert report.windows == (None, 3, None, 3)
    assert len(calls) == 2
