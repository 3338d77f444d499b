"""Sessions over graphs that a measurement builds by hand, on ONNX Runtime's CPU provider."""

from typing import TYPE_CHECKING

from kvconv import custom_ops, names

if TYPE_CHECKING:
    import onnx
    import onnxruntime

_IR_VERSION = 10
_OPSET = 21


def open_session(
    graph: "onnx.GraphProto", *, threads: int, log_severity: int = 2
) -> "onnxruntime.InferenceSession":
    """Open a session of a graph of ONNX's operators, ONNX Runtime's and kvconv's.

    Args:
        graph: With its inputs, outputs and initializers; no subfunctions.
        threads: Size of ONNX Runtime's pool, >= 1.
        log_severity: The least that ONNX Runtime prints: 2 warnings, 4 fatal errors only.
    """
    import onnxruntime
    from onnx import helper

    opsets = [
        helper.make_opsetid("", _OPSET),
        helper.make_opsetid(names.OP_DOMAIN, names.OP_VERSION),
        helper.make_opsetid(names.ORT_DOMAIN, 1),
    ]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = log_severity
    custom_ops.register(options)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
