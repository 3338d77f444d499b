"""The norms of kvconv against float64: with a residual sum, with a mean, and of heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

import one_node
from kvconv import names

EPSILON = 1e-3
TOLERANCES = {"float32": 2e-6, "float16": 2e-3}
SKIP_OPS = (names.SKIP_RMS_NORMALIZATION, names.SKIP_LAYER_NORMALIZATION)
Arrays = Mapping[str, npt.NDArray[Any] | None]


def open_session(op: str, inputs: Arrays, epsilon: float = EPSILON) -> ort.InferenceSession:
    """Open a session of one skip norm; None where an optional input is absent."""
    return one_node.make_session(
        op,
        inputs,
        {"epsilon": epsilon},
        outputs=("output", "sum"),
        output_type=np.asarray(inputs["input"]).dtype,
        threads=2,
    )


def run(op: str, inputs: Arrays) -> list[npt.NDArray[Any]]:
    feeds = {name: array for name, array in inputs.items() if array is not None}
    outputs: list[npt.NDArray[Any]] = open_session(op, inputs).run(None, feeds)
    return outputs


def rms_norm(x: npt.NDArray[np.float64], weight: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight.astype(np.float64)


def random_inputs(
    op: str, shape: tuple[int, ...], kind: str = "float32", *, optional: bool = False
) -> dict[str, npt.NDArray[Any] | None]:
    """Return inputs of a skip norm in order, the optional ones on request."""
    random = np.random.default_rng(shape[-1])
    vectors = {
        names.SKIP_RMS_NORMALIZATION: ("input_weight",),
        names.SKIP_LAYER_NORMALIZATION: ("bias", "input_bias"),
    }[op]

    def normal(*sizes: int) -> npt.NDArray[Any]:
        return (random.standard_normal(sizes) * 3).astype(kind)

    inputs: dict[str, npt.NDArray[Any] | None] = {
        "input": normal(*shape),
        "skip": normal(*shape),
        "weight": normal(shape[-1]),
    }
    return inputs | {name: normal(shape[-1]) if optional else None for name in vectors}


@pytest.mark.parametrize("optional", [False, True], ids=["plain", "optional inputs"])
@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(2, 3, 17), (3, 211, 64), (0, 4, 8), (5, 576)], ids=str)
@pytest.mark.parametrize("op", SKIP_OPS)
def test_output_is_the_norm_of_the_sum(
    op: str, shape: tuple[int, ...], kind: str, optional: bool
) -> None:
    inputs = random_inputs(op, shape, kind, optional=optional)
    output, total = run(op, inputs)
    given = {name: array.astype(np.float64) for name, array in inputs.items() if array is not None}
    x = given["input"]
    if "input_weight" in given:
        x = rms_norm(x, given["input_weight"])
    exact = x + given.get("input_bias", 0) + given["skip"]
    tolerance = TOLERANCES[kind]
    np.testing.assert_allclose(total, exact, rtol=tolerance, atol=10 * tolerance)
    assert output.dtype == total.dtype == np.dtype(kind)
    rounded = total.astype(np.float64)
    if op == names.SKIP_LAYER_NORMALIZATION:
        rounded -= rounded.mean(-1, keepdims=True)
    expected = rms_norm(rounded, given["weight"]) + given.get("bias", 0)
    np.testing.assert_allclose(output, expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("op", SKIP_OPS)
def test_row_does_not_depend_on_the_others(op: str) -> None:
    inputs = random_inputs(op, (200, 576))
    together = run(op, inputs)
    alone = {
        name: array[77:78] if array is not None and array.ndim == 2 else array
        for name, array in inputs.items()
    }
    for a, b in zip(together, run(op, alone), strict=True):
        np.testing.assert_array_equal(a[77:78], b)


@pytest.mark.parametrize("op", SKIP_OPS)
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"skip": (2, 4)}, r"input has shape \[2, 8\] and skip \[2, 4\]"),
        ({"weight": (4,)}, r"weight has shape \[4\], input \[2, 8\]"),
        ({"skip": (1, 8)}, r"skip \[1, 8\]"),
    ],
    ids=["skip", "weight", "one row"],
)
def test_shapes_that_do_not_fit_are_refused(
    op: str, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    inputs = random_inputs(op, (2, 8))
    with pytest.raises(Exception, match=message):
        run(op, inputs | {name: np.ones(shape, np.float32) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (names.SKIP_RMS_NORMALIZATION, "input_weight"),
        (names.SKIP_LAYER_NORMALIZATION, "bias"),
        (names.SKIP_LAYER_NORMALIZATION, "input_bias"),
    ],
)
def test_optional_input_of_another_width_is_refused(op: str, name: str) -> None:
    inputs = random_inputs(op, (2, 8)) | {name: np.ones(9, np.float32)}
    with pytest.raises(Exception, match=rf"{name} has shape \[9\], input \[2, 8\]"):
        run(op, inputs)


@pytest.mark.parametrize("op", SKIP_OPS)
@pytest.mark.parametrize("epsilon", [-1.0, np.nan, np.inf])
def test_epsilon_that_is_no_number_of_at_least_0_is_refused(op: str, epsilon: float) -> None:
    with pytest.raises(Exception, match=f"{op}: epsilon is {epsilon:g}"):
        open_session(op, random_inputs(op, (2, 8)), epsilon=epsilon)


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [4, 12, 64, 65])
def test_heads_of_query_and_key_are_normed_and_values_copied(kind: str, head_dim: int) -> None:
    random = np.random.default_rng(head_dim)
    heads, kv_heads = 4, 2
    packed = random.standard_normal((2, 37, (heads + 2 * kv_heads) * head_dim)).astype(kind)
    query_weight, key_weight = random.standard_normal((2, head_dim)).astype(kind)
    output = one_node.run(
        names.HEAD_RMS_NORMALIZATION,
        {"input": packed, "query_weight": query_weight, "key_weight": key_weight},
        {"num_heads": heads, "kv_num_heads": kv_heads, "epsilon": EPSILON},
        output_type=kind,
        threads=2,
    )
    exact = packed.astype(np.float64).reshape(2, 37, -1, head_dim)
    query, key, value = np.split(exact, [heads, heads + kv_heads], axis=2)
    expected = np.concatenate([rms_norm(query, query_weight), rms_norm(key, key_weight)], axis=2)
    found = output.reshape(exact.shape)
    np.testing.assert_array_equal(found[:, :, heads + kv_heads :], value)
    tolerance = TOLERANCES[kind]
    np.testing.assert_allclose(
        found[:, :, : heads + kv_heads], expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
    ("width", "weights", "attributes", "message"),
    [
        (23, (8, 8), {}, r"input has shape \[2, 23\].* 2 query heads and 1 key heads of 8"),
        (24, (8, 4), {}, r"query_weight has shape \[8\] and key_weight \[4\]"),
        (24, (8, 8), {"num_heads": 0}, "num_heads is 0"),
        (24, (8, 8), {"kv_num_heads": 2**62}, "kv_num_heads is 4611686018427387904"),
    ],
    ids=["input", "weights", "no heads", "too many heads"],
)
def test_heads_that_do_not_fit_are_refused(
    width: int, weights: tuple[int, int], attributes: dict[str, int], message: str
) -> None:
    query_weight, key_weight = (np.ones(size, np.float32) for size in weights)
    inputs = {
        "input": np.ones((2, width), np.float32),
        "query_weight": query_weight,
        "key_weight": key_weight,
    }
    with pytest.raises(Exception, match=message):
        one_node.run(
            names.HEAD_RMS_NORMALIZATION, inputs, {"num_heads": 2, "kv_num_heads": 1} | attributes
        )
