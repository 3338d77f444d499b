"""Rule `gqa`: the logits and caches of the traced graph, or a refusal that says why."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import RewriteReport, read_graph, rewrite, rotation, write_graph
from kvconv.converter.rewrite.graph import Editor, find
from kvconv.errors import RewriteError
from rewrite_graphs import bool_mask, decoder
from tolerances import assert_close

LENGTH, CAPACITY = 64, 16
RUNS = ((2, 0, 5), (2, 7, 1), (1, 7, 1), (1, 6, 4))
"""Batch size, past and new tokens of the runs that the node takes."""
INSIDE: dict[str, dict[str, Any]] = {
    "half": {"head_dim": 16},
    "interleaved": {"head_dim": 32, "style": "interleaved"},
    "partial": {"head_dim": 32, "style": "partial"},
}
OUTSIDE: dict[str, dict[str, Any]] = {
    "half": {},
    "interleaved": {"style": "interleaved"},
    "partial": {"style": "partial"},
    "too few pairs": {"head_dim": 16, "style": "partial"},
}
UNROTATED: dict[str, dict[str, Any]] = {
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "window": {"masks": (bool_mask(window=3),)},
    "window and softcap": {"masks": (bool_mask(window=3),), "softcap": 1.5},
    "chunk": {"masks": (bool_mask(chunk=4),)},
    "alibi": {"masks": (graphs.alibi_mask,)},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "two layers": {"masks": (bool_mask(), bool_mask(window=2))},
}
CASES = {
    **{f"{name} inside": options for name, options in INSIDE.items()},
    **{f"{name} outside": options for name, options in OUTSIDE.items()},
    **{name: {"style": "none", **options} for name, options in UNROTATED.items()},
}


def to_gqa(graph: gs.Graph, **options: Any) -> RewriteReport:
    options = {"opset": graph.opset, "max_sequence_length": LENGTH, **options}
    return rewrite(graph, attention="gqa", **options)


def the_node(graph: gs.Graph) -> gs.Node:
    (node,) = find(graph, names.GROUP_QUERY_ATTENTION, names.ORT_DOMAIN)
    return node


def ones(batch: int, past: int, new: int) -> npt.NDArray[np.int64]:
    return np.ones((batch, past + new), np.int64)


def assert_equals_traced(
    graph: gs.Graph, traced: gs.Graph, folder: Path, dtype: str = "float32"
) -> None:
    """Compare all runs, with buffers of full capacity and with concatenated caches."""
    session = graphs.open_session(graph, folder)
    for batch, past, new in RUNS:
        for capacity in (CAPACITY, 0):
            mask = ones(batch, past, new)
            expected = graphs.run_traced(traced, graphs.make_feeds(traced, mask, new))
            feeds = graphs.make_feeds(traced, mask, new, capacity=capacity)
            actual = graphs.run(session, feeds)
            for name, value in expected.items():
                found = actual[name]
                if name != names.LOGITS:
                    assert found.shape[2] == (capacity or past + new)
                    found = found[:, :, : past + new]
                what = f"batch {batch}, past {past}, new {new}, capacity {capacity}: {name}"
                assert_close(found.astype(np.float32), value.astype(np.float32), dtype, what)


def copy(graph: gs.Graph) -> gs.Graph:
    return gs.import_onnx(gs.export_onnx(graph))


@pytest.mark.parametrize("case", CASES)
def test_gqa_gives_the_traced_logits_and_caches(case: str, tmp_path: Path) -> None:
    graph = decoder(**CASES[case])
    traced = copy(graph)
    report = to_gqa(graph)
    assert report.counts["gqa"] == len(report.windows)
    assert find(graph, names.OP_NAME, names.OP_DOMAIN) == []
    assert_equals_traced(graph, traced, tmp_path)


def test_gqa_at_opset_18_gives_the_traced_logits(tmp_path: Path) -> None:
    graph = decoder(opset=18, head_dim=16, masks=(graphs.alibi_mask,), kv_heads=1)
    traced = copy(graph)
    to_gqa(graph)
    assert_equals_traced(graph, traced, tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import} == {
        "": 18,
        names.ORT_DOMAIN: 1,
    }


@pytest.mark.parametrize("style", INSIDE)
def test_gqa_float16_gives_the_traced_logits(style: str, tmp_path: Path) -> None:
    graph = decoder(dtype=np.float16, **INSIDE[style])
    traced = copy(graph)
    assert to_gqa(graph).refusals == ()
    # bfloat16's tolerance: both sides round every tensor on the way to 11 bits.
    assert_equals_traced(graph, traced, tmp_path, "bfloat16")


@pytest.mark.parametrize("case", INSIDE)
def test_rotation_inside_leaves_no_position_ids_and_is_folded_on_load(
    case: str, tmp_path: Path
) -> None:
    graph = decoder(**INSIDE[case])
    assert to_gqa(graph).refusals == ()
    assert names.POSITION_IDS not in {tensor.name for tensor in graph.inputs}
    assert the_node(graph).attrs["do_rotary"] == 1
    write_graph(graph, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < 100_000
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "folded.onnx")
    ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    folded = {node.op_type for node in onnx.load(tmp_path / "folded.onnx").graph.node}
    assert names.GROUP_QUERY_ATTENTION in folded
    assert not {"Cos", "Sin", "Range"} & folded


@pytest.mark.parametrize("case", OUTSIDE)
def test_rotation_outside_says_why_and_keeps_position_ids(case: str) -> None:
    graph = decoder(**OUTSIDE[case])
    (refusal,) = to_gqa(graph).refusals
    assert refusal.rule == "gqa"
    assert "rotation stays outside: head_dim is" in refusal.reason
    assert names.POSITION_IDS in {tensor.name for tensor in graph.inputs}
    assert "do_rotary" not in the_node(graph).attrs


def test_window_is_guarded_by_an_attribute_that_old_onnxruntimes_refuse() -> None:
    windowed, plain = decoder(masks=(bool_mask(window=3),)), decoder()
    assert to_gqa(windowed).windows == (3,)
    assert the_node(windowed).attrs["local_window_size"] == 3
    assert the_node(windowed).attrs["causal"] == 1
    assert to_gqa(plain).windows == (None,)
    assert not {"local_window_size", "causal"} & the_node(plain).attrs.keys()


def whole_chunks(b: graphs.Builder) -> gs.Variable:
    """Return a mask that no attributes can say: a query sees its chunk, later slots included."""
    row, column = graphs.slots(b)
    size = b.const(4)
    same = b.op("Equal", b.op("Div", row, size), b.op("Div", column, size), dtype=bool)
    shape = [graphs.BATCH, 1, graphs.SEQUENCE, graphs.TOTAL]
    return b.op("And", same, graphs.padding(b), shape=shape)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (CASES["window"], {"local_window_size": 4}),
        (CASES["softcap"], {"softcap": 0.0}),
        # The node must not be causal on top of a bias that sees ahead.
        ({"style": "none", "masks": (whole_chunks,)}, {"causal": 1}),
    ],
    ids=["window", "softcap", "causal"],
)
def test_gqa_without_a_feature_differs(
    options: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    """Equality above says something only where the feature moves the logits."""
    graph = decoder(**options)
    traced = copy(graph)
    to_gqa(graph)
    assert_equals_traced(graph, traced, tmp_path)
    the_node(graph).attrs |= change
    with pytest.raises(AssertionError, match="differ"):
        assert_equals_traced(graph, traced, tmp_path)


def test_gqa_twice_changes_nothing() -> None:
    for options in (INSIDE["half"], OUTSIDE["half"], {"masks": (graphs.alibi_mask,)}):
        graph = decoder(**options)
        to_gqa(graph)
        once = gs.export_onnx(graph).SerializeToString()
        assert set(to_gqa(graph).counts.values()) == {0}
        assert gs.export_onnx(graph).SerializeToString() == once


def test_gqa_of_a_flash_graph_equals_gqa_of_a_traced_one(tmp_path: Path) -> None:
    graph = decoder(head_dim=16)
    traced = copy(graph)
    rewrite(graph, attention="flash", opset=23)
    write_graph(graph, tmp_path / "flash.onnx")
    graph = read_graph(tmp_path / "flash.onnx")
    assert to_gqa(graph).counts["gqa"] == 1
    assert_equals_traced(graph, traced, tmp_path)


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"value_head_dim": 16}, {}, "keys are 8 wide and values 16"),
        ({"head_dim": 12}, {}, "head_dim is 12; GroupQueryAttention takes multiples of 8"),
        ({}, {"window_size": 3, "causal": 0}, "it has a window and is not causal"),
        ({}, {"cache_mode": "ring"}, "GroupQueryAttention has no cache_mode"),
    ],
    ids=["widths", "head_dim", "window", "unknown attribute"],
)
def test_gqa_refuses_what_the_node_cannot_express(
    options: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    graph = decoder(**options)
    if change:
        rewrite(graph, attention="flash", opset=23)
        (node,) = find(graph, names.OP_NAME, names.OP_DOMAIN)
        node.attrs |= change
    with pytest.raises(RewriteError, match=f"gqa: .*{reason}") as caught:
        to_gqa(graph)
    assert caught.value.found == 0


def test_gqa_refuses_another_cache_type() -> None:
    graph = decoder()
    rewrite(graph, attention="flash", opset=23)
    for tensor in graph.inputs:
        if tensor.name.startswith("past_key_values"):
            tensor.dtype = np.dtype(np.float16)
    with pytest.raises(RewriteError, match="activations are float32 and the cache float16"):
        to_gqa(graph)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("no length", "the number of positions is not known"),
        ("large", r"a table of 64 positions takes .* --max-sequence-length"),
        ("mask", "its cos and sin have no table: it depends on the input attention_mask"),
        ("neighbours", "depend on more than each token's position"),
        ("float16", "its cos and sin are not exact in float16"),
    ],
)
def test_tables_are_refused_where_they_would_not_be_exact(
    case: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = graphs.Builder()
    if case == "mask":
        b.positions = b.op("CumSum", b.mask, b.const(1))
    elif case == "neighbours":
        b.positions = b.op("CumSum", b.positions, b.const(1))
    elif case == "large":
        monkeypatch.setattr(rotation, "_MAX_TABLE_BYTES", 100)
    tables = [b.op("Squeeze", table, b.const([1])) for table in graphs.tables(b, 8)]
    editor = Editor(b.graph, max_sequence_length=None if case == "no length" else LENGTH)
    dtype = np.dtype(np.float16 if case == "float16" else np.float32)
    answer = rotation.tables_by_position(editor, *tables, dtype=dtype)
    assert isinstance(answer, str)
    assert re.search(reason, answer), answer
