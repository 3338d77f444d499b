"""A weight that is to be quantised: what reading PyTorch's memory finds, and what it takes."""

import sys

import numpy as np
import onnx_ir as ir
import pytest

from kvconv.converter import float_weight
from kvconv.converter.float_weight import FloatWeight
from kvconv.errors import ExportError
from kvconv.memory import peak_rss_mb, reset_peak_rss

WIDTHS, IN_FEATURES = (700, 1, 300), 16


def parts() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.normal(size=(width, IN_FEATURES)).astype(np.float32) for width in WIDTHS]


def made(arrays: list[np.ndarray], name: str = "layer.w") -> FloatWeight:
    return FloatWeight(
        name,
        [lambda array=array: array for array in arrays],
        out_features=sum(map(len, arrays)),
        in_features=arrays[0].shape[1],
        dtype=ir.DataType.FLOAT if arrays[0].dtype == np.float32 else ir.DataType.FLOAT16,
    )


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(float_weight, "_CHUNK_WEIGHTS", 64 * IN_FEATURES)


@pytest.mark.parametrize("value", [9.5, -9.5])
@pytest.mark.parametrize(("part", "row"), [(0, 0), (0, 699), (1, 0), (2, 299)])
def test_reach_is_the_farthest_number_of_all_chunks(small_chunks, value, part, row):
    arrays = parts()
    arrays[part][row, 3] = value
    assert made(arrays).reach == 9.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("part", "row"), [(0, 0), (0, 100), (2, 299)])
def test_a_number_that_is_not_finite_is_refused_by_name(small_chunks, value, part, row):
    arrays = parts()
    arrays[part][row, -1] = value
    with pytest.raises(ExportError, match=r"layer\.w holds infinities or NaN"):
        made(arrays)


def test_chunks_are_all_rows_in_pytorchs_memory(small_chunks):
    arrays = parts()
    chunks = list(made(arrays).chunks())
    np.testing.assert_array_equal(np.concatenate(chunks), np.concatenate(arrays))
    assert max(map(len, chunks)) == 64
    assert all(any(np.shares_memory(chunk, array) for array in arrays) for chunk in chunks)


def test_sample_is_of_the_whole_and_not_of_each_part():
    arrays = parts()
    sample = made(arrays).sample()
    np.testing.assert_array_equal(sample.numpy(), np.concatenate(arrays)[::3])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs")
def test_a_float16_weight_is_never_copied_whole(is_transposed):
    memory = np.full((8192, 4096), 0.5, np.float16)
    view = memory.T if is_transposed else memory
    weight = made([view, view[:16]])
    weight.sample()  # what torch takes once; a copy of this size goes back to the system
    assert reset_peak_rss()
    before = peak_rss_mb()
    weight.sample()
    assert peak_rss_mb() - before < memory.nbytes / 1e6 / 2
    assert weight.reach == 0.5
