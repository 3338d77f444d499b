"""Which columns a Split or a Slice cuts, whatever of its operands is left to its default."""

import onnx_graphsurgeon as gs
import pytest

from kvconv.converter.rewrite.match import columns
from rewrite_graphs import Builder

WIDTH = 12


def cut(*operands: list[int], shape: tuple[str | int, ...] = ("s", WIDTH)) -> gs.Variable:
    """Return a Slice with these starts, ends, axes and steps."""
    b = Builder()
    x = gs.Variable("x", b.dtype, list(shape))
    return b.op("Slice", x, *[b.const(values) for values in operands])


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        (([2], [5], [-1]), (2, 5)),
        (([2], [5], [1], [1]), (2, 5)),
        (([-5], [2**62], [1]), (WIDTH - 5, WIDTH)),
    ],
    ids=["axis from the end", "steps of one", "to the end"],
)
def test_columns_of_a_slice(operands: tuple[list[int], ...], expected: tuple[int, int]) -> None:
    found = columns(cut(*operands))
    assert found is not None
    assert (found.start, found.end, found.source.name) == (*expected, "x")


@pytest.mark.parametrize(
    "operands",
    [([2, 2], [5, 5]), ([2], [5], [0]), ([2], [5], [1], [2])],
    ids=["every axis", "rows", "every second column"],
)
def test_columns_of_a_slice_of_something_else_are_none(operands: tuple[list[int], ...]) -> None:
    assert columns(cut(*operands)) is None


@pytest.mark.parametrize("shape", [("s", "w"), ()], ids=["unknown width", "scalar"])
def test_columns_of_what_has_no_width_are_none(shape: tuple[str, ...]) -> None:
    assert columns(cut([2], [5], [-1], shape=shape)) is None
