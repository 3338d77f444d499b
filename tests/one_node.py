"""Running one node on ONNX Runtime, with kvconv's op library registered, for tests."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import NodeProto, helper

from kvconv import names
from kvconv.bench.session import open_session


def open_node(
    node: NodeProto,
    inputs: Mapping[str, tuple[int, int]],
    outputs: Mapping[str, int],
    *,
    threads: int = 1,
) -> onnxruntime.InferenceSession:
    """Open a session of one node.

    Args:
        node: The node.
        inputs: ONNX type and rank of each input that is fed.
        outputs: ONNX type of each output.
        threads: Size of ONNX Runtime's pool.
    """
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, kind, [None] * rank)
            for name, (kind, rank) in inputs.items()
        ],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )
    return open_session(graph, threads=threads, log_severity=4)  # errors are asserted on


def make_session(
    op: str,
    inputs: Mapping[str, npt.NDArray | None],
    attributes: Mapping[str, int | float | str],
    *,
    domain: str = names.OP_DOMAIN,
    outputs: Sequence[str] = ("Y",),
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
        outputs: Names of the node's outputs.
        output_type: dtype of the outputs.
        threads: Size of ONNX Runtime's pool.
    """
    given = {
        name: (helper.np_dtype_to_tensor_dtype(array.dtype), array.ndim)
        for name, array in inputs.items()
        if array is not None
    }
    node = helper.make_node(
        op,
        [name if name in given else "" for name in inputs],
        list(outputs),
        domain=domain,
        **attributes,
    )
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(output_type))
    return open_node(node, given, dict.fromkeys(outputs, kind), threads=threads)


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
