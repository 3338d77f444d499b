"""kvconv::SkipRMSNormalization against float64."""

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from kvconv import custom_ops, names

EPSILON = 1e-3


def open_session(*shapes: tuple[int, ...], epsilon: float = EPSILON) -> ort.InferenceSession:
    """Open a session of one node whose inputs have the ranks of these shapes."""
    inputs, outputs = ("input", "skip", "weight"), ("output", "sum")
    node = helper.make_node(
        names.SKIP_RMS_NORMALIZATION, inputs, outputs, domain=names.OP_DOMAIN, epsilon=epsilon
    )
    float32 = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, float32, [None] * len(shape))
            for name, shape in zip(inputs, shapes, strict=True)
        ],
        [helper.make_tensor_value_info(name, float32, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(names.OP_DOMAIN, names.OP_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    custom_ops.register(options)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(*arrays: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    names_of = ("input", "skip", "weight")
    session = open_session(*(array.shape for array in arrays))
    outputs: list[npt.NDArray[np.float32]] = session.run(
        None, dict(zip(names_of, arrays, strict=True))
    )
    return outputs


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 576])
@pytest.mark.parametrize("leading", [(1, 1), (2, 3), (3, 211), (0, 4), (5,)], ids=str)
def test_output_is_the_norm_of_the_sum(leading: tuple[int, ...], width: int) -> None:
    random = np.random.default_rng(width)
    x, skip = (random.standard_normal((*leading, width)).astype(np.float32) * 3 for _ in "xs")
    weight = random.standard_normal(width).astype(np.float32)
    output, total = run(x, skip, weight)
    exact = x.astype(np.float64) + skip
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPSILON) * weight
    np.testing.assert_array_equal(total, x + skip)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_row_does_not_depend_on_the_others() -> None:
    random = np.random.default_rng(0)
    x, skip = (random.standard_normal((200, 576)).astype(np.float32) for _ in "xs")
    weight = random.standard_normal(576).astype(np.float32)
    together = run(x, skip, weight)
    alone = run(x[77:78], skip[77:78], weight)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a[77:78], b)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8), (2, 4), (8,)), r"input has shape \[2, 8\] and skip \[2, 4\]"),
        (((2, 8), (2, 8), (4,)), r"weight has shape \[4\], input \[2, 8\]"),
        (((2, 8), (1, 8), (8,)), r"skip \[1, 8\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        run(*(np.ones(shape, np.float32) for shape in shapes))


@pytest.mark.parametrize("epsilon", [-1.0, np.nan, np.inf])
def test_epsilon_that_is_no_number_of_at_least_0_is_refused(epsilon: float) -> None:
    with pytest.raises(Exception, match=f"SkipRMSNormalization: epsilon is {epsilon:g}"):
        open_session((2, 8), (2, 8), (8,), epsilon=epsilon)
