"""Every refusal of MatMulNBits, GatherBlockQuantized and GatedActivation names both values."""

import numpy as np
import numpy.typing as npt
import pytest

import one_node

Inputs = dict[str, npt.NDArray | None]

MATMUL = {"K": 70, "N": 6, "bits": 4, "block_size": 32}  # 3 blocks, 48 bytes a row
GATHER = {"K": 70, "bits": 4, "block_size": 32}


def zeros(*shape: int, kind: str = "float32") -> npt.NDArray:
    return np.zeros(shape, dtype=kind)


def matmul_inputs() -> Inputs:
    return {
        "A": zeros(2, 70),
        "B": zeros(6, 48, kind="uint8"),
        "scales": zeros(6, 3),
        "zero_points": None,
        "bias": None,
    }


def gather_inputs() -> Inputs:
    return {
        "data": zeros(6, 48, kind="uint8"),
        "indices": zeros(2, kind="int64"),
        "scales": zeros(6, 3),
        "zero_points": None,
    }


MATMUL_ERRORS: dict[str, tuple[Inputs, list[str]]] = {
    "A width": ({"A": zeros(2, 71)}, ["A", "[2, 71]", "K 70"]),
    "A rank": ({"A": zeros(1, 1, 1, 1, 1, 1, 1, 2, 70)}, ["rank 9", "at most 8"]),
    "A scalar": ({"A": zeros()}, ["A", "[]", "K 70"]),
    "B rank": ({"B": zeros(6, 3, 16, kind="uint8")}, ["B", "rank 3", "rank 2"]),
    "B rows": ({"B": zeros(5, 48, kind="uint8")}, ["B", "is 5", "must be 6"]),
    "B bytes": ({"B": zeros(6, 35, kind="uint8")}, ["B", "is 35", "must be 48"]),
    "scales rank": ({"scales": zeros(18)}, ["scales", "rank 1", "rank 2"]),
    "scales rows": ({"scales": zeros(7, 3)}, ["scales", "is 7", "must be 6"]),
    "scales blocks": ({"scales": zeros(6, 2)}, ["scales", "is 2", "must be 3"]),
    "zero points rank": ({"zero_points": zeros(18)}, ["zero_points", "rank 1", "rank 2"]),
    "zero points": ({"zero_points": zeros(6, 4)}, ["zero_points", "is 4", "must be 3"]),
    "bias": ({"bias": zeros(5)}, ["bias", "[5]", "N 6"]),
    "bias rank": ({"bias": zeros(6, 1)}, ["bias", "[6, 1]", "N 6"]),
}
GATHER_ERRORS: dict[str, tuple[Inputs, list[str]]] = {
    "data rank": ({"data": zeros(6, kind="uint8")}, ["data", "rank 1", "rank 2"]),
    "data bytes": ({"data": zeros(6, 47, kind="uint8")}, ["data", "is 47", "must be 48"]),
    "scales rows": ({"scales": zeros(5, 3)}, ["scales", "is 5", "must be 6"]),
    "zero points": ({"zero_points": zeros(6, 2)}, ["zero_points", "is 2", "must be 3"]),
    "indices rank": (
        {"indices": zeros(1, 1, 1, 1, 1, 1, 1, 1, kind="int64")},
        ["rank 9", "at most 8"],
    ),
    "index large": ({"indices": np.array([0, 6])}, ["holds 6", "6 rows", "to 5"]),
    "index small": ({"indices": np.array([-7])}, ["holds -7", "from -6"]),
}
ATTRIBUTE_ERRORS: dict[str, tuple[dict[str, int | float], list[str]]] = {
    "K absent": ({"K": 0}, ["K is 0", "from 1"]),
    "bits": ({"bits": 2}, ["bits is 2", "4 or 8"]),
    "block size small": ({"block_size": 8}, ["block_size is 8", "16, 32"]),
    "block size large": ({"block_size": 512}, ["block_size is 512", "256"]),
    "block size odd": ({"block_size": 48}, ["block_size is 48", "16, 32"]),
    "type": ({"bits": 4.0}, ["bits", "must be an integer"]),
}


def test_the_valid_inputs_are_accepted() -> None:
    assert one_node.run("MatMulNBits", matmul_inputs(), MATMUL).shape == (2, 6)
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


@pytest.mark.parametrize("changes", [{"N": 0}, {"accuracy_level": 2}])
def test_attributes_of_the_product_alone_are_refused(changes: dict[str, int]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(Exception, match=f"kvconv::MatMulNBits: {name} is {value}"):
        one_node.make_session("MatMulNBits", matmul_inputs(), MATMUL | changes)


def test_gated_activation_refuses_odd_widths_and_unknown_functions() -> None:
    with pytest.raises(Exception, match=r"kvconv::GatedActivation: input has shape \[2, 7\]"):
        one_node.run("GatedActivation", {"input": zeros(2, 7)}, {"activation": "silu"})
    with pytest.raises(Exception, match='kvconv::GatedActivation: activation is "swish"'):
        one_node.make_session("GatedActivation", {"input": zeros(2, 8)}, {"activation": "swish"})
