"""Running one node on ONNX Runtime, with kvconv's op library registered, for tests."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import helper

from kvconv import custom_ops, names


def make_session(
    op: str,
    inputs: Mapping[str, npt.NDArray | None],
    attributes: Mapping[str, int | float | str],
    *,
    domain: str = names.OP_DOMAIN,
    output_type: npt.DTypeLike = np.float32,
    threads: int = 1,
) -> onnxruntime.InferenceSession:
    """Build a session of one node whose inputs are all fed.

    Args:
        op: The node's operator.
        inputs: The node's inputs in order; None where an optional one is absent. Only types and
            ranks count.
        attributes: The node's attributes.
        domain: The operator's domain.
        output_type: dtype of the one output, `Y`.
        threads: Size of ONNX Runtime's pool.
    """
    given = {name: array for name, array in inputs.items() if array is not None}
    node = helper.make_node(
        op,
        [name if name in given else "" for name in inputs],
        ["Y"],
        domain=domain,
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim
            )
            for name, array in given.items()
        ],
        [
            helper.make_tensor_value_info(
                "Y", helper.np_dtype_to_tensor_dtype(np.dtype(output_type)), None
            )
        ],
    )
    opsets = [
        helper.make_opsetid("", 21),
        helper.make_opsetid(names.OP_DOMAIN, names.OP_VERSION),
        helper.make_opsetid(names.ORT_DOMAIN, 1),
    ]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are asserted on, not printed
    custom_ops.register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    op: str,
    inputs: Mapping[str, npt.NDArray | None],
    attributes: Mapping[str, int | float | str],
    *,
    domain: str = names.OP_DOMAIN,
    output_type: npt.DTypeLike = np.float32,
    threads: int = 1,
) -> npt.NDArray:
    """Run one node and return its output; the arguments are those of `make_session`."""
    session = make_session(
        op, inputs, attributes, domain=domain, output_type=output_type, threads=threads
    )
    fed = {name: array for name, array in inputs.items() if array is not None}
    return session.run(None, fed)[0]
