"""Gates are recognised by what they compute, and become one node that computes it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from kvconv import names
from kvconv.converter.rewrite import gated
from kvconv.converter.rewrite.graph import Editor, find, sort
from rewrite_graphs import Builder, open_session, run

WIDTH = 24
Activation = Callable[[Builder, gs.Variable], gs.Variable]


def silu(b: Builder, x: gs.Variable) -> gs.Variable:
    return b.op("Mul", x, b.op("Sigmoid", x))


def gelu(b: Builder, x: gs.Variable) -> gs.Variable:
    return b.op("Gelu", x, approximate="none")


def gelu_tanh(b: Builder, x: gs.Variable) -> gs.Variable:
    return b.op("Gelu", x, approximate="tanh")


def gelu_tanh_spelled_out(b: Builder, x: gs.Variable) -> gs.Variable:
    cube = b.op("Mul", b.op("Pow", x, b.const(3, b.dtype)), b.const(0.044715, b.dtype))
    inner = b.op("Mul", b.op("Add", x, cube), b.const(math.sqrt(2 / math.pi), b.dtype))
    one = b.op("Add", b.op("Tanh", inner), b.const(1, b.dtype))
    return b.op("Mul", b.op("Mul", x, b.const(0.5, b.dtype)), one)


def gelu_spelled_out(b: Builder, x: gs.Variable) -> gs.Variable:
    erf = b.op("Erf", b.op("Div", x, b.const(math.sqrt(2), b.dtype)))
    one = b.op("Add", erf, b.const(1, b.dtype))
    return b.op("Mul", b.op("Mul", x, b.const(0.5, b.dtype)), one)


def relu(b: Builder, x: gs.Variable) -> gs.Variable:
    return b.op("Relu", x)


def quick_gelu(b: Builder, x: gs.Variable) -> gs.Variable:
    return b.op("Mul", x, b.op("Sigmoid", b.op("Mul", x, b.const(1.702, b.dtype))))


def build(
    activation: Activation,
    *,
    widths: tuple[int, int] = (WIDTH, WIDTH),
    halves: bool = False,
    dtype: type = np.float32,
) -> Builder:
    """Return a graph of one gate; `halves` leaves the widths of a Split unsaid."""
    b = Builder(dtype=dtype)
    shape = ["batch_size", "sequence_length"]
    x = gs.Variable("x", b.dtype, [*shape, sum(widths)])
    b.graph.inputs = [x]
    gate, up = (gs.Variable(n, b.dtype, [*shape, w]) for n, w in zip("gu", widths, strict=True))
    split = gs.Node("Split", "split", {"axis": -1}, [x, b.const(list(widths))], [gate, up])
    if halves:
        split.inputs.pop()
        split.attrs["num_outputs"] = 2
    b.graph.nodes.append(split)
    b.output(b.op("Mul", activation(b, gate), up, shape=[*shape, widths[1]]), "before")
    b.graph.outputs = [b.op("Neg", b.graph.outputs[0], shape=[*shape, widths[1]])]
    return b


GATES = [
    (silu, "silu"),
    (gelu, "gelu"),
    (gelu_tanh, "gelu_tanh"),
    (gelu_tanh_spelled_out, "gelu_tanh"),
    (relu, "relu"),
]


@pytest.mark.parametrize(
    ("activation", "called"),
    GATES,
)
def test_gate_becomes_one_node_with_the_same_numbers(
    tmp_path: Path, activation: Activation, called: str
) -> None:
    x = np.random.default_rng(4).standard_normal((2, 3, 2 * WIDTH)).astype(np.float32) * 3
    results: list[Any] = []
    for rewritten in (False, True):
        b = build(activation)
        if rewritten:
            b = build(activation, halves=called == "silu")
            assert gated.apply(Editor(b.graph)).count == 1
            sort(b.graph)
            (node,) = find(b.graph, names.GATED_ACTIVATION, names.OP_DOMAIN)
            assert node.attrs == {"activation": called}
            assert [n.op for n in b.graph.nodes] == [names.GATED_ACTIVATION, "Neg"]
            assert gated.apply(Editor(b.graph)).count == 0
        session = open_session(b.graph, tmp_path)
        results += run(session, {"x": x}).values()
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "called"), [*GATES, (gelu_spelled_out, "gelu")])
def test_gate_of_float16_is_called_what_it_is_nearest_to(
    activation: Activation, called: str
) -> None:
    b = build(activation, dtype=np.float16)
    assert gated.apply(Editor(b.graph)).count == 1
    (node,) = find(b.graph, names.GATED_ACTIVATION, names.OP_DOMAIN)
    assert node.attrs == {"activation": called}


def test_gate_of_float16_that_is_near_to_none_stays() -> None:
    assert gated.apply(Editor(build(quick_gelu, dtype=np.float16).graph)).count == 0


def test_gate_of_unknown_shape_stays() -> None:
    b = build(silu)
    (split,) = find(b.graph, "Split")
    split.outputs[0].shape = None
    assert gated.apply(Editor(b.graph)).count == 0


@pytest.mark.parametrize(
    ("activation", "widths"),
    [(quick_gelu, (WIDTH, WIDTH)), (silu, (1, WIDTH))],
    ids=["unknown activation", "unequal halves"],
)
def test_something_else_stays(activation: Activation, widths: tuple[int, int]) -> None:
    b = build(activation, widths=widths)
    assert gated.apply(Editor(b.graph)).count == 0
    assert len(find(b.graph, "Split")) == 1
