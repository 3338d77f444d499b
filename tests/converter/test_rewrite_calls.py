"""What attention calls say of windows and causality, against what their masks say."""

from collections.abc import Callable
from typing import Any

import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import RewriteReport, read_graph, rewrite
from kvconv.converter.rewrite.graph import find
from kvconv.converter.rewrite.mask import LONG_PAST
from kvconv.errors import RewriteError
from rewrite_graphs import Mask, bool_mask, decoder
from tiny_decoders import WINDOW

FLAVOURS = pytest.mark.parametrize("attention", ["flash", "standard"])


def rewritten(attention: str, windows: tuple[int, ...], *masks: Mask) -> RewriteReport:
    return rewrite(decoder(masks=masks, windows=windows), attention=attention, opset=23)


@FLAVOURS
@pytest.mark.parametrize(("called", "said"), [(3, 4), (0, 3), (3, 0)])
def test_calls_that_say_another_window_are_reported_and_the_mask_counts(
    attention: str, called: int, said: int
) -> None:
    report = rewritten(attention, (0, called), bool_mask(), bool_mask(window=said))
    assert report.windows == (None, said or None)
    (refusal,) = report.refusals
    assert (refusal.rule, refusal.node) == ("calls", "layer 1")
    words = [f"window {size}" if size else "no window" for size in (called, said)]
    assert refusal.reason == (
        f"its attention call says causal and {words[0]}, its mask causal and {words[1]}, "
        f"which counts"
    )


@FLAVOURS
def test_mask_that_is_not_causal_is_refused_whatever_the_call_says(attention: str) -> None:
    with pytest.raises(RewriteError, match="layer 1 lets tokens see later ones") as info:
        rewritten(attention, (0, 0), bool_mask(), graphs.padding)
    assert (info.value.expected, info.value.found) == (2, 1)


@FLAVOURS
def test_calls_that_agree_are_not_reported(attention: str) -> None:
    masks = (bool_mask(window=3), bool_mask(), bool_mask())
    report = rewritten(attention, (3, 0, LONG_PAST + 1), *masks)
    assert (report.windows, report.refusals) == ((3, None, None), ())


@FLAVOURS
def test_window_of_a_mask_that_stays_a_bias_is_the_calls(attention: str) -> None:
    report = rewritten(attention, (6, 0), bool_mask(chunk=4), bool_mask(chunk=4))
    assert report.windows == (6, None)
    assert {refusal.rule for refusal in report.refusals} <= {"mask"}


def test_calls_are_not_asked_of_a_graph_rewritten_before() -> None:
    graph = decoder(masks=(bool_mask(window=3),), windows=(4,))
    assert len(rewrite(graph, attention="flash", opset=23).refusals) == 1
    report = rewrite(graph, attention="flash", opset=23)
    assert (report.windows, report.refusals) == ((3,), ())


@pytest.mark.kinds
@FLAVOURS
def test_calls_of_transformers_count_the_query_in_its_window_as_masks_do(
    attention: str, traced: Callable[[str], Any]
) -> None:
    _, _, path = traced("gemma3_text")
    graph: gs.Graph = read_graph(path)
    nodes = find(graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    assert [node.attrs["window_size"] for node in nodes] == [WINDOW, 0]
    report = rewrite(graph, attention=attention, opset=23)
    assert report.windows == (WINDOW, None)
    assert report.refusals == ()
