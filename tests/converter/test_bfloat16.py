"""bfloat16 arithmetic done in float32: the same numbers, and ONNX Runtime runs it."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch

from kvconv.converter.bfloat16 import compute_in_float32


def test_bfloat16_product_is_rounded_as_pytorch_rounds_it() -> None:
    types = (onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16)
    x, y = (onnx.helper.make_tensor_value_info(n, types[0], [None]) for n in "xy")
    wide = onnx.helper.make_tensor_value_info("product", types[1], [None])
    nodes = [
        onnx.helper.make_node("Cast", ["x"], ["narrow_x"], to=types[1]),
        onnx.helper.make_node("Cast", ["y"], ["narrow_y"], to=types[1]),
        onnx.helper.make_node("Mul", ["narrow_x", "narrow_y"], ["product"]),
        onnx.helper.make_node("Cast", ["product"], ["z"], to=types[0]),
    ]
    z = onnx.helper.make_tensor_value_info("z", types[0], [None])
    graph = onnx.helper.make_graph(nodes, "g", [x, y], [z], value_info=[wide])
    opset = [onnx.helper.make_opsetid("", 23)]
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10))
    assert compute_in_float32(model.graph) == 1
    assert compute_in_float32(model.graph) == 0
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal(200).astype(np.float32) for name in "xy"}
    (actual,) = session.run(None, feeds)
    narrow = [torch.tensor(feeds[name]).bfloat16() for name in "xy"]
    assert np.array_equal(actual, (narrow[0] * narrow[1]).float().numpy())
    assert not np.array_equal(actual, feeds["x"] * feeds["y"])
