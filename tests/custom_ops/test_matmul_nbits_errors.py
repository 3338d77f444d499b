"""Every refusal of MatMulNBits, GatherBlockQuantized and GatedActivation names both values."""

import numpy as np
import numpy.typing as npt
import pytest

import one_node

Inputs = dict[str, npt.NDArray | None]

MATMUL = {"K": 70, "N": 22, "bits": 4, "block_size": 32}  # 2 groups, 3 blocks, 12 words a row
GATHER = MATMUL
DATA = "[2, 12, 16, 4]"
BLOCKS = "[2, 3, 16]"


def zeros(*shape: int, kind: str = "float32") -> npt.NDArray:
    return np.zeros(shape, dtype=kind)


def matmul_inputs() -> Inputs:
    return {
        "A": zeros(2, 70),
        "B": zeros(2, 12, 16, 4, kind="uint8"),
        "scales": zeros(2, 3, 16),
        "zero_points": None,
        "bias": None,
    }


def gather_inputs() -> Inputs:
    return {
        "data": zeros(2, 12, 16, 4, kind="uint8"),
        "indices": zeros(2, kind="int64"),
        "scales": zeros(2, 3, 16),
        "zero_points": None,
    }


MATMUL_ERRORS: dict[str, tuple[Inputs, list[str]]] = {
    "A width": ({"A": zeros(2, 71)}, ["A", "[2, 71]", "K 70"]),
    "A rank": ({"A": zeros(1, 1, 1, 1, 1, 1, 1, 2, 70)}, ["A has rank 9", "at most 8"]),
    "A scalar": ({"A": zeros()}, ["A", "[]", "K 70"]),
    "B by rows": (
        {"B": zeros(22, 48, kind="uint8")},
        ["B", "[22, 48]", DATA, "Export the model again"],
    ),
    "B groups": ({"B": zeros(1, 12, 16, 4, kind="uint8")}, ["B", "[1, 12, 16, 4]", DATA]),
    "B words": ({"B": zeros(2, 9, 16, 4, kind="uint8")}, ["B", "[2, 9, 16, 4]", DATA]),
    "scales by rows": (
        {"scales": zeros(22, 3)},
        ["scales", "[22, 3]", BLOCKS, "Export the model again"],
    ),
    "scales groups": ({"scales": zeros(3, 3, 16)}, ["scales", "[3, 3, 16]", BLOCKS]),
    "scales blocks": ({"scales": zeros(2, 2, 16)}, ["scales", "[2, 2, 16]", BLOCKS]),
    "zero points by rows": ({"zero_points": zeros(22, 3)}, ["zero_points", "[22, 3]", BLOCKS]),
    "zero points": ({"zero_points": zeros(2, 4, 16)}, ["zero_points", "[2, 4, 16]", BLOCKS]),
    "bias": ({"bias": zeros(5)}, ["bias", "[5]", "N 22"]),
    "bias rank": ({"bias": zeros(22, 1)}, ["bias", "[22, 1]", "N 22"]),
}
GATHER_ERRORS: dict[str, tuple[Inputs, list[str]]] = {
    "data by rows": ({"data": zeros(22, 48, kind="uint8")}, ["data", "[22, 48]", DATA]),
    "data words": ({"data": zeros(2, 11, 16, 4, kind="uint8")}, ["data", "[2, 11, 16, 4]", DATA]),
    "scales groups": ({"scales": zeros(1, 3, 16)}, ["scales", "[1, 3, 16]", BLOCKS]),
    "zero points": ({"zero_points": zeros(2, 2, 16)}, ["zero_points", "[2, 2, 16]", BLOCKS]),
    "indices rank": (
        {"indices": zeros(1, 1, 1, 1, 1, 1, 1, 1, kind="int64")},
        ["Y has rank 9", "at most 8"],
    ),
    "index of a filling row": ({"indices": np.array([0, 22])}, ["holds 22", "22 rows", "to 21"]),
    "index small": ({"indices": np.array([-23])}, ["holds -23", "from -22"]),
}
ATTRIBUTE_ERRORS: dict[str, tuple[dict[str, int | float], list[str]]] = {
    "K absent": ({"K": 0}, ["K is 0", "from 1"]),
    "N absent": ({"N": 0}, ["N is 0", "from 1"]),
    "bits": ({"bits": 2}, ["bits is 2", "4 or 8"]),
    "block size small": ({"block_size": 8}, ["block_size is 8", "16, 32"]),
    "block size large": ({"block_size": 512}, ["block_size is 512", "256"]),
    "block size odd": ({"block_size": 48}, ["block_size is 48", "16, 32"]),
    "type": ({"bits": 4.0}, ["bits", "must be an integer"]),
}


def test_the_valid_inputs_are_accepted() -> None:
    assert one_node.run("MatMulNBits", matmul_inputs(), MATMUL).shape == (2, 22)
    assert one_node.run("GatherBlockQuantized", gather_inputs(), GATHER).shape == (2, 70)


@pytest.mark.parametrize("name", MATMUL_ERRORS)
def test_inconsistent_inputs_of_the_product_are_refused(name: str) -> None:
    changes, fragments = MATMUL_ERRORS[name]
    with pytest.raises(Exception, match="kvconv::MatMulNBits") as raised:
        one_node.run("MatMulNBits", matmul_inputs() | changes, MATMUL)
    for fragment in fragments:
        assert fragment in str(raised.value)


@pytest.mark.parametrize("name", GATHER_ERRORS)
def test_inconsistent_inputs_of_the_gather_are_refused(name: str) -> None:
    changes, fragments = GATHER_ERRORS[name]
    with pytest.raises(Exception, match="kvconv::GatherBlockQuantized") as raised:
        one_node.run("GatherBlockQuantized", gather_inputs() | changes, GATHER)
    for fragment in fragments:
        assert fragment in str(raised.value)


@pytest.mark.parametrize("name", ATTRIBUTE_ERRORS)
def test_bad_attributes_are_refused_when_the_session_is_made(name: str) -> None:
    changes, fragments = ATTRIBUTE_ERRORS[name]
    for op, inputs, attributes in (
        ("MatMulNBits", matmul_inputs(), MATMUL),
        ("GatherBlockQuantized", gather_inputs(), GATHER),
    ):
        with pytest.raises(Exception, match=f"kvconv::{op}") as raised:
            one_node.make_session(op, inputs, attributes | changes)
        for fragment in fragments:
            assert fragment in str(raised.value)


@pytest.mark.parametrize("level", [0, 3, 5])
def test_accuracy_levels_that_the_product_lacks_are_refused(level: int) -> None:
    with pytest.raises(Exception, match=f"kvconv::MatMulNBits: accuracy_level is {level}"):
        one_node.make_session("MatMulNBits", matmul_inputs(), MATMUL | {"accuracy_level": level})


def test_gated_activation_refuses_odd_widths_and_unknown_functions() -> None:
    with pytest.raises(Exception, match=r"kvconv::GatedActivation: input has shape \[2, 7\]"):
        one_node.run("GatedActivation", {"input": zeros(2, 7)}, {"activation": "silu"})
    with pytest.raises(Exception, match='kvconv::GatedActivation: activation is "swish"'):
        one_node.make_session("GatedActivation", {"input": zeros(2, 8)}, {"activation": "swish"})
