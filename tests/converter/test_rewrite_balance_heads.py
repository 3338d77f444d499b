"""Norms of query and key heads are balanced for quantised caches, and scores stay the same."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import balance_heads, rewrite
from kvconv.converter.rewrite.graph import Editor, find
from tolerances import assert_close

PAIRS = {
    "half": [(0, 4), (1, 5), (2, 6), (3, 7)],
    "interleaved": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "partial": [(0, 2), (1, 3), (4,), (5,), (6,), (7,)],
    "none": [(channel,) for channel in range(8)],
}
"""Style of rotation -> channels of a head of 8 that must have one factor."""


def build(style: str = "half") -> gs.Graph:
    """Return a decoder after all rules but this one."""
    graph = graphs.normed_decoder(style=style)
    rewrite(graph, attention="flash", opset=23)
    return graph


def balance(graph: gs.Graph) -> tuple[int, tuple[str, ...]]:
    """Apply the rule; return how often it fired, and why it did not."""
    outcome = balance_heads.apply(Editor(graph, cache_dtype="int4"))
    return outcome.count, tuple(refusal.reason for refusal in outcome.refusals)


def weights(graph: gs.Graph) -> list[npt.NDArray]:
    """Return the weights of the query norm and the key norm."""
    (norm,) = find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
    return [tensor.values for tensor in norm.inputs[1:3]]


@pytest.mark.parametrize("style", PAIRS)
def test_balanced_norms_give_the_same_logits_and_even_energies(tmp_path: Path, style: str) -> None:
    graph = build(style)
    feeds = graphs.make_feeds(graph, graphs.make_mask(0, 9), 9)
    before = weights(graph)
    expected = graphs.run(graphs.open_session(graph, tmp_path), feeds)[names.LOGITS]
    assert balance(graph) == (1, ())
    found = graphs.run(graphs.open_session(graph, tmp_path), feeds)[names.LOGITS]
    assert_close(found, expected, "float32", "logits")
    after = weights(graph)
    query_factor, key_factor = (new / old for new, old in zip(after, before, strict=True))
    np.testing.assert_allclose(query_factor * key_factor, 1, rtol=1e-6)
    np.testing.assert_allclose(np.log(key_factor).mean(), 0, atol=1e-6)
    energies = [[np.mean(w[list(pair)] ** 2) for pair in PAIRS[style]] for w in after]
    ratio = np.divide(*energies)
    assert ratio.max() / ratio.min() < 1 + 1e-5
    for pair in PAIRS[style]:
        assert np.ptp(key_factor[list(pair)]) < 1e-6
    assert balance(graph) == (0, ())  # a second time there is nothing to do


def test_a_weight_of_zero_keeps_factors_within_bounds() -> None:
    graph = build("none")
    (norm,) = find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
    for index, channel in ((1, 0), (2, 5)):
        norm.inputs[index].values[channel] = 0
    before = weights(graph)
    assert balance(graph) == (1, ())
    query, key = weights(graph)
    assert query[0] == 0 == key[5]
    assert np.isfinite([query, key]).all()
    factor = np.delete(key / np.where(before[1] == 0, 1, before[1]), 5)
    assert factor.max() / factor.min() < 1e6 ** (1 / 2)


def test_weights_that_constants_compute_are_balanced() -> None:
    """Gemma adds 1 to each."""
    graph = build()
    (norm,) = find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
    wanted = norm.inputs[1].values
    editor = Editor(graph)
    one = editor.constant(np.ones((), np.float32))
    less = editor.constant(wanted - 1)
    norm.inputs[1] = editor.add("Add", [less, one], dtype=np.float32, shape=[8])
    assert balance(graph) == (1, ())
    query, key = weights(graph)
    assert 0.1 < np.abs(query / wanted - 1).max()
    assert query.dtype == key.dtype == np.float32


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_float_caches_keep_their_norms(dtype: str | None) -> None:
    graph = build()
    before = weights(graph)
    outcome = balance_heads.apply(Editor(graph, cache_dtype=dtype))
    assert (outcome.count, outcome.refusals) == (0, ())
    np.testing.assert_array_equal(weights(graph), before)


def test_normed_heads_that_something_else_reads_are_refused() -> None:
    graph = build()
    (norm,) = find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
    Editor(graph).add_node("Identity", [norm.outputs[0]], [gs.Variable("seen")])
    count, (reason,) = balance(graph)
    assert count == 0
    assert "Identity" in reason
    assert "reads the normed heads as well" in reason


def test_weights_that_are_no_constants_are_refused() -> None:
    graph = build()
    (norm,) = find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
    norm.inputs[2] = Editor(graph).add("Cast", [graph.inputs[2]], {"to": 1}, dtype=np.float32)
    count, (reason,) = balance(graph)
    assert count == 0
    assert "is no constant: it depends on the input position_ids" in reason


@pytest.mark.parametrize("value", [0, np.nan])
def test_weights_without_energy_are_refused(value: float) -> None:
    graph = build()
    (norm,) = find(graph, names.HEAD_RMS_NORMALIZATION, names.OP_DOMAIN)
    norm.inputs[2].values[:] = value
    count, (reason,) = balance(graph)
    assert count == 0
    assert "zero everywhere, or not finite" in reason
