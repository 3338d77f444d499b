"""Lays weights out as ONNX Runtime reads them, and streams them to disk.

PyTorch keeps a linear layer's weight as [out, in] and multiplies by its transpose. Here the
transpose goes into the stored tensor, one weight at a time while it is written, so that neither
export nor load ever holds a second copy. A tied embedding is stored once and stays [vocab_size,
hidden_size], because the embedding gathers its rows: there the LM head becomes a Gemm, which
reads it that way.
"""

from pathlib import Path

import onnx_ir as ir

from kvconv.converter import experts
from kvconv.converter.linear_weight import LinearWeight
from kvconv.names import MODEL_FILE, WEIGHTS_FILE

INLINE_BYTES = 1024
"""Tensors up to this size stay in `model.onnx`, where graph rewriting can read them."""

_PAGE_BYTES = 4096


def lay_out(model: ir.Model) -> None:
    """Remove every transpose of a weight from the graph; changes the model in place.

    1. A weight that is only ever transposed is stored transposed.
    2. A weight that is also read as it is (a tied embedding) is multiplied by a Gemm.
    3. A stack of experts' weights becomes one weight per expert.
    """
    experts.unroll(model.graph)
    for weight in list(model.graph.initializers.values()):
        transposes = [node for node in weight.consumers() if _swaps_axes(node)]
        if not transposes:
            continue
        if len(transposes) == len(weight.uses()) and not weight.is_graph_output():
            _store_transposed(model.graph, weight, transposes)
        else:
            for transpose in transposes:
                _multiply_by_gemm(model.graph, weight, transpose)


def save(model: ir.Model, folder: Path) -> Path:
    """Write `model.onnx` and `model.onnx.data` into a folder; returns the path of the graph.

    Tensors are materialised one by one, so memory stays at one copy of the weights plus the
    largest of them.
    """
    path = folder / MODEL_FILE
    ir.save(
        model,
        path,
        external_data=WEIGHTS_FILE,
        size_threshold_bytes=INLINE_BYTES,
        alignment=_PAGE_BYTES,  # so that a memory map of a large weight starts on its own page
    )
    return path


def _swaps_axes(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and node.attributes.get_ints("perm", ()) == (1, 0)


def _store_transposed(graph: ir.Graph, weight: ir.Value, transposes: list[ir.Node]) -> None:
    tensor, name = weight.const_value, weight.name
    assert tensor is not None
    assert name is not None
    rows, columns = _sizes(tensor)
    stored = LinearWeight(name, [tensor.numpy], [rows], in_features=columns, dtype=tensor.dtype)
    transposed = ir.Value(name=name, type=weight.type, shape=stored.shape, const_value=stored)
    for transpose in transposes:
        transpose.outputs[0].replace_all_uses_with(transposed)
        graph.remove(transpose, safe=True)
    graph.initializers.pop(name)
    graph.register_initializer(transposed)


def _sizes(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(tensor.numpy().shape)


def _multiply_by_gemm(graph: ir.Graph, weight: ir.Value, transpose: ir.Node) -> None:
    """Turn each MatMul(x, Transpose(weight)) into a Gemm over x flattened to two axes.

    x: [batch_size, sequence_length, hidden_size], weight: [vocab_size, hidden_size].
    """
    tensor = weight.const_value
    assert tensor is not None
    out_features, in_features = _sizes(tensor)
    for matmul in list(transpose.outputs[0].consumers()):
        if matmul.op_type != "MatMul" or matmul.inputs[1] is not transpose.outputs[0]:
            continue
        tape = ir.tape.Tape()
        x = matmul.inputs[0]
        assert x is not None
        rows = tape.initializer(ir.tensor([-1, in_features], name=f"{weight.name}.rows"))
        width = tape.initializer(ir.tensor([out_features], name=f"{weight.name}.width"))
        product = tape.op("Gemm", [tape.op("Reshape", [x, rows]), weight], attributes={"transB": 1})
        leading = tape.op("Shape", [x], attributes={"start": 0, "end": -1})
        shape = tape.op("Concat", [leading, width], attributes={"axis": 0})
        result = tape.op("Reshape", [product, shape])
        for initializer in tape.initializers:
            graph.register_initializer(initializer)
        ir.convenience.replace_nodes_and_values(
            graph, matmul, [matmul], tape.nodes, matmul.outputs, [result]
        )
    if not transpose.outputs[0].uses():
        graph.remove(transpose, safe=True)
