"""Weight layout: transposes go into the file, tied embeddings stay one tensor."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from kvconv.converter.simplify import simplify
from kvconv.converter.weights import INLINE_BYTES, lay_out, save
from kvconv.names import WEIGHTS_FILE

VOCAB, HIDDEN, INNER = 37, 24, 40


@pytest.fixture
def arrays():
    random = np.random.default_rng(5)
    return {
        "embedding": random.normal(size=(VOCAB, HIDDEN)).astype(np.float32),
        "linear": random.normal(size=(INNER, HIDDEN)).astype(np.float32),
        "back": random.normal(size=(HIDDEN, INNER)).astype(np.float32),
    }


def linear(graph_tape, x, weight):
    transposed = graph_tape.op("Transpose", [weight], attributes={"perm": [1, 0]})
    return graph_tape.op("MatMul", [x, transposed])


@pytest.fixture
def model(arrays):
    """A decoder's skeleton: embed, two linear layers, and a head tied to the embedding."""
    tape = ir.tape.Tape()
    ids = ir.Input("ids", shape=ir.Shape(["b", "s"]), type=ir.TensorType(ir.DataType.INT64))
    weights = {
        name: ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.FLOAT),
            const_value=ir.Tensor(array, name=name),
        )
        for name, array in arrays.items()
    }
    hidden = tape.op("Gather", [weights["embedding"], ids])
    hidden = linear(tape, linear(tape, hidden, weights["linear"]), weights["back"])
    logits = linear(tape, hidden, weights["embedding"])
    logits.name = "logits"
    logits.type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [ids], [logits], nodes=tape.nodes, initializers=list(weights.values()),
        opset_imports={"": 23}, name="tied",
    )  # fmt: skip
    return ir.Model(graph, ir_version=10)


def expected(arrays, ids):
    hidden = arrays["embedding"][ids] @ arrays["linear"].T @ arrays["back"].T
    return hidden @ arrays["embedding"].T


@pytest.mark.parametrize("shape", [(1, 1), (3, 5)], ids=str)
def test_layout_keeps_the_function(model, arrays, tmp_path, shape):
    lay_out(model)
    simplify(model)
    session = ort.InferenceSession(save(model, tmp_path), providers=["CPUExecutionProvider"])
    ids = np.arange(np.prod(shape)).reshape(shape) % VOCAB
    np.testing.assert_allclose(
        session.run(None, {"ids": ids})[0], expected(arrays, ids), rtol=1e-5, atol=1e-3
    )


def test_no_transpose_is_left_and_the_tied_weight_is_stored_once(model, arrays, tmp_path):
    lay_out(model)
    path = save(model, tmp_path)
    stored = onnx.load(path)
    assert [node.op_type for node in stored.graph.node if node.op_type == "Transpose"] == []
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in stored.graph.initializer}
    np.testing.assert_array_equal(tensors["linear"], arrays["linear"].T)
    np.testing.assert_array_equal(tensors["back"], arrays["back"].T)
    np.testing.assert_array_equal(tensors["embedding"], arrays["embedding"])
    (gemm,) = [node for node in stored.graph.node if node.op_type == "Gemm"]
    assert gemm.input[1] == "embedding"
    large = sum(array.nbytes for array in arrays.values())
    assert large <= (tmp_path / WEIGHTS_FILE).stat().st_size < 2 * large


def test_simplify_folds_constants_but_no_weight(model, arrays, tmp_path):
    simplify(model)
    path = save(model, tmp_path)
    names = {t.name for t in onnx.load(path, load_external_data=False).graph.initializer}
    assert arrays.keys() <= names
    assert all(array.nbytes > INLINE_BYTES for array in arrays.values())


def test_weights_are_materialised_only_while_they_are_written(model, tmp_path):
    lay_out(model)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    lazy = [tensor for tensor in tensors if isinstance(tensor, ir.LazyTensor)]
    assert len(lazy) == 2
    save(model, tmp_path)
    assert all(tensor._tensor is None for tensor in lazy)
