"""The Add behind a product: taken for a bias only where it is one of the layer's width."""

import numpy as np
import onnx_ir as ir
import pytest

from kvconv.converter.bias import bias_behind


def constant(name: str, *sizes: int) -> ir.Value:
    return ir.Value(name=name, const_value=ir.Tensor(np.ones(sizes, np.float32), name=name))


def product_and(op: str, other: ir.Value, *, is_first: bool = True) -> tuple[ir.Value, ir.Node]:
    tape = ir.tape.Tape()
    product = tape.op("MatMul", [ir.Value(name="x"), constant("w", 4, 8)])
    tape.op(op, [product, other] if is_first else [other, product])
    return product, list(tape.nodes)[-1]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_vector_of_the_width_is_the_bias(is_first):
    bias = constant("b", 8)
    product, add = product_and("Add", bias, is_first=is_first)
    assert bias_behind(product, 8) == (add, bias)


@pytest.mark.parametrize(
    ("op", "other"),
    [
        ("Sub", constant("b", 8)),
        ("Add", constant("b", 1)),
        ("Add", constant("b", 1, 8)),
        ("Add", ir.Value(name="computed")),
    ],
    ids=["sub", "narrow", "matrix", "computed"],
)
def test_anything_else_is_none(op, other):
    product, _ = product_and(op, other)
    assert bias_behind(product, 8) is None


def test_a_product_that_is_read_elsewhere_too_has_none():
    product, _ = product_and("Add", constant("b", 8))
    ir.tape.Tape().op("Relu", [product])
    assert bias_behind(product, 8) is None


def test_a_product_that_the_graph_returns_has_none():
    product, add = product_and("Add", constant("b", 8))
    graph = ir.Graph([], [product, add.outputs[0]], nodes=[product.producer(), add])
    assert product in graph.outputs
    assert bias_behind(product, 8) is None
