"""Packing: layers that read the same numbers become one MatMul, whose weight is made on the way."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from kvconv.converter.linear_weight import LinearWeight
from kvconv.converter.packed import pack
from kvconv.converter.weights import lay_out, save

HIDDEN = 24
WIDTHS = {"attn.q.weight": 32, "attn.k.weight": 16, "attn.v.weight": 8, "mlp.up.weight": 40}


def value(name, array):
    return ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.FLOAT),
        const_value=ir.Tensor(array, name=name),
    )


def make(random, *, biased=(), shared=False):
    """Return a model of linear layers over x, as traced, and their weights and biases."""
    tape, values, outputs = ir.tape.Tape(), [], []
    x = ir.Input("x", shape=ir.Shape(["b", "s", HIDDEN]), type=ir.TensorType(ir.DataType.FLOAT))
    for name, width in WIDTHS.items():
        weight = value(name, random.normal(size=(width, HIDDEN)).astype(np.float32))
        values.append(weight)
        linear = tape.op("MatMul", [x, tape.op("Transpose", [weight], attributes={"perm": [1, 0]})])
        if name in biased:
            bias = value(name.replace("weight", "bias"), random.normal(size=width).astype("f"))
            values.append(bias)
            linear = tape.op("Add", [bias, linear])
        if shared and name == "attn.k.weight":
            outputs.append(tape.op("Abs", [weight]))
            outputs[-1].name = "elsewhere"
        outputs.append(tape.op("Tanh", [linear]))
        outputs[-1].name = name.rpartition(".")[0]
    for output in outputs:
        output.type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [x], outputs, nodes=tape.nodes, initializers=values, opset_imports={"": 23}, name="linears"
    )
    return ir.Model(graph, ir_version=10), {v.name: v.const_value.numpy() for v in values}


def run(model, folder, x):
    session = ort.InferenceSession(save(model, folder), providers=["CPUExecutionProvider"])
    return dict(
        zip((o.name for o in session.get_outputs()), session.run(None, {"x": x}), strict=True)
    )


def count(model, op):
    return sum(node.op_type == op for node in model.graph)


@pytest.fixture
def random():
    return np.random.default_rng(2)


@pytest.mark.parametrize(
    "biased", [(), ("attn.q.weight", "attn.v.weight"), tuple(WIDTHS)], ids=["none", "some", "all"]
)
def test_layers_of_one_module_become_one_and_compute_the_same(random, tmp_path, biased):
    model, arrays = make(random, biased=biased)
    lay_out(model)
    assert pack(model) == 1
    assert count(model, "MatMul") == 2  # the other module's layer stays
    x = random.normal(size=(2, 3, HIDDEN)).astype(np.float32)
    outputs = run(model, tmp_path, x)
    for name in WIDTHS:
        bias = arrays.get(name.replace("weight", "bias"), 0)
        expected = np.tanh(x @ arrays[name].T + bias)
        np.testing.assert_allclose(outputs[name.rpartition(".")[0]], expected, rtol=1e-5, atol=1e-5)


def test_packed_weight_is_made_while_it_is_written_and_replaces_its_parts(random):
    model, arrays = make(random, biased=tuple(WIDTHS))
    lay_out(model)
    pack(model)
    large = [name for name in model.graph.initializers if name.endswith("weight")]
    assert sorted(large) == ["attn.q+k+v.weight", "mlp.up.weight"]
    packed = model.graph.initializers["attn.q+k+v.weight"].const_value
    assert isinstance(packed, LinearWeight)
    assert packed._tensor is None
    rows = np.concatenate([arrays[f"attn.{name}.weight"] for name in "qkv"])
    np.testing.assert_array_equal(packed.torch_layout(), rows)
    np.testing.assert_array_equal(packed.numpy(), rows.T)


def test_weight_that_something_else_reads_is_not_packed(random):
    model, _ = make(random, shared=True)
    lay_out(model)
    assert pack(model) == 1
    assert "attn.q+v.weight" in model.graph.initializers


def test_packing_twice_changes_nothing(random):
    model, _ = make(random)
    lay_out(model)
    pack(model)
    nodes = len(model.graph)
    assert pack(model) == 0
    assert len(model.graph) == nodes
