"""kvconv::MatMulNBits and kvconv::GatherBlockQuantized against numpy and com.microsoft's ops.

The weights' groups are 16 rows, the kernels' tiles up to 16 rows of activations and their pieces 32
columns, so sizes around those count.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

import one_node
from kvconv import names


@dataclass(frozen=True)
class Weights:
    """A quantised matrix, as both ops take it, and what it means.

    Rows that fill up the last group hold what must never be used: NaN for scales.
    """

    rows: int
    columns: int
    bits: int = 4
    block_size: int = 32
    scale_type: str = "float16"
    has_zero_points: bool = False
    whole_zero_points: bool = False
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        return -(-self.columns // self.block_size)

    @property
    def attributes(self) -> dict[str, int | float | str]:
        sizes = {"K": self.columns, "N": self.rows}
        return sizes | {"bits": self.bits, "block_size": self.block_size}

    def quantized(self) -> npt.NDArray[np.uint8]:
        """Return q [N, num_blocks, block_size]; what lies beyond K is random too."""
        rng = np.random.default_rng(self.seed)
        shape = (self.rows, self.num_blocks, self.block_size)
        return rng.integers(0, 1 << self.bits, shape).astype(np.uint8)

    def data(self) -> npt.NDArray[np.uint8]:
        q = self.quantized().reshape(self.rows, -1)
        if self.bits == 8:
            bytes_of_words = [q[:, b::4] for b in range(4)]
        else:
            bytes_of_words = [q[:, b::8] | (q[:, b + 4 :: 8] << 4) for b in range(4)]
        return in_groups(np.stack(bytes_of_words, axis=2), 0xFF)

    def grouped_scales(self) -> npt.NDArray:
        return in_groups(self.scales(), np.nan)

    def grouped_zero_points(self) -> npt.NDArray | None:
        zero_points = self.zero_points()
        return None if zero_points is None else in_groups(zero_points, np.nan)

    def scales(self) -> npt.NDArray:
        rng = np.random.default_rng(self.seed + 1)
        scales = rng.uniform(0.01, 0.1, (self.rows, self.num_blocks))
        return scales.astype(self.scale_type)

    def zero_points(self) -> npt.NDArray | None:
        if not self.has_zero_points:
            return None
        rng = np.random.default_rng(self.seed + 2)
        zero_points = rng.uniform(0, (1 << self.bits) - 1, (self.rows, self.num_blocks))
        if self.whole_zero_points:
            zero_points = zero_points.round()
        return zero_points.astype(self.scale_type)

    def dense(self) -> npt.NDArray[np.float64]:
        """Return the weights [N, K]."""
        zero_points = self.zero_points()
        middle = np.full(self.scales().shape, 1 << (self.bits - 1), dtype=np.float64)
        zeros = middle if zero_points is None else zero_points.astype(np.float64)
        q = self.quantized().astype(np.float64)
        weights = (q - zeros[:, :, None]) * self.scales().astype(np.float64)[:, :, None]
        return weights.reshape(self.rows, -1)[:, : self.columns]


def in_groups(rows: npt.NDArray, filling: float) -> npt.NDArray:
    """Turn [N, width, ..] into [ceil(N / 16), width, 16, ..]."""
    missing = np.full((-len(rows) % 16, *rows.shape[1:]), filling, rows.dtype)
    groups = np.concatenate([rows, missing]).reshape(-1, 16, *rows.shape[1:])
    return np.ascontiguousarray(groups.swapaxes(1, 2))


def rounded(a: npt.NDArray, block_size: int, level: int) -> npt.NDArray[np.float64]:
    """Round activations [M, K] as an accuracy level does: in pieces of 32 (or 16).

    The largest of a piece becomes 127, or 127 * 256 at level 2.
    """
    if level == 1:
        return a.astype(np.float64)
    piece = min(32, block_size)
    a32 = a.astype(np.float32)
    padded = np.pad(a32, ((0, 0), (0, -a.shape[1] % piece))).reshape(len(a), -1, piece)
    largest = np.abs(padded).max(axis=2, keepdims=True)
    steps = np.float32(127 if level == 4 else 127 * 256)
    inverse = steps / np.where(largest == 0, np.float32(1), largest)
    q = np.rint(padded * inverse).astype(np.float64)
    return (q * (largest / steps)).reshape(len(a), -1)[:, : a.shape[1]]


def activations(rows: int, columns: int, kind: str = "float32") -> npt.NDArray:
    return np.random.default_rng(7).standard_normal((rows, columns)).astype(kind)


def multiply(
    weights: Weights,
    a: npt.NDArray,
    *,
    bias: npt.NDArray | None = None,
    accuracy_level: int,
    threads: int = 1,
) -> npt.NDArray:
    return one_node.run(
        "MatMulNBits",
        {
            "A": a,
            "B": weights.data(),
            "scales": weights.grouped_scales(),
            "zero_points": weights.grouped_zero_points(),
            "bias": bias,
        },
        weights.attributes | {"accuracy_level": accuracy_level},
        output_type=a.dtype,
        threads=threads,
    )


def assert_product(
    actual: npt.NDArray, a: npt.NDArray, weights: Weights, bias: npt.NDArray | float = 0.0
) -> None:
    """Compare with a float64 product; errors of rounding grow with the terms' magnitudes."""
    a = a.astype(np.float64)
    expected = a @ weights.dense().T + bias
    magnitude = np.abs(a) @ np.abs(weights.dense()).T + np.abs(bias)
    relative = 2e-6 if actual.dtype == np.float32 else 1e-3
    assert actual.shape == expected.shape
    assert (np.abs(actual - expected) <= relative * magnitude + 1e-30).all()


LEVELS = (1, 2, 4)
SIZES = [
    (1, 1, 1),
    (1, 7, 31),
    (2, 15, 32),
    (3, 16, 33),
    (5, 17, 64),
    (6, 31, 65),
    (7, 32, 127),
    (12, 33, 128),
    (15, 63, 129),
    (16, 64, 576),
    (17, 65, 100),
    (33, 100, 300),
]


@pytest.mark.parametrize(("rows", "outputs", "columns"), SIZES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("accuracy_level", LEVELS)
def test_product_equals_numpy(
    rows: int, outputs: int, columns: int, bits: int, has_zero_points: bool, accuracy_level: int
) -> None:
    weights = Weights(outputs, columns, bits, has_zero_points=has_zero_points, seed=rows)
    a = activations(rows, columns)
    actual = multiply(weights, a, accuracy_level=accuracy_level)
    assert_product(actual, rounded(a, 32, accuracy_level), weights)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("scale_type", ["float16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [16, 200, 512, 700])
def test_product_with_each_block_size_equals_numpy(
    block_size: int, scale_type: str, bits: int, columns: int
) -> None:
    weights = Weights(19, columns, bits, block_size, scale_type, has_zero_points=columns == 200)
    a = activations(3, columns)
    for level in LEVELS:
        actual = multiply(weights, a, accuracy_level=level)
        assert_product(actual, rounded(a, block_size, level), weights)


@pytest.mark.parametrize("accuracy_level", LEVELS)
def test_float16_activations_and_bias(accuracy_level: int) -> None:
    weights = Weights(37, 96)
    a = activations(5, 96, "float16")
    bias = np.linspace(-3, 3, 37).astype(np.float16)
    actual = multiply(weights, a, bias=bias, accuracy_level=accuracy_level)
    used = rounded(a, 32, accuracy_level)
    assert actual.dtype == np.float16
    assert_product(actual, used, weights, bias.astype(np.float64))


@pytest.mark.parametrize("accuracy_level", LEVELS)
def test_leading_axes_are_kept_and_may_be_empty(accuracy_level: int) -> None:
    weights = Weights(8, 40)
    a = activations(6, 40)
    whole = multiply(weights, a, accuracy_level=accuracy_level)
    shaped = multiply(weights, a.reshape(2, 1, 3, 40), accuracy_level=accuracy_level)
    assert shaped.shape == (2, 1, 3, 8)
    assert np.array_equal(shaped.reshape(6, 8), whole)
    assert np.array_equal(multiply(weights, a[2], accuracy_level=accuracy_level), whole[2])
    assert multiply(weights, a[:0], accuracy_level=accuracy_level).shape == (0, 8)


def test_zero_activations_give_the_bias() -> None:
    bias = np.arange(20, dtype=np.float32)
    for level in LEVELS:
        a = np.zeros((3, 64), dtype=np.float32)
        a[1, :32] = 1e-38  # too small to be scaled
        actual = multiply(Weights(20, 64), a, bias=bias, accuracy_level=level)
        assert np.allclose(actual, bias, atol=1e-30)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("accuracy_level", LEVELS)
def test_largest_values_do_not_saturate(bits: int, accuracy_level: int) -> None:
    class Extreme(Weights):
        def quantized(self) -> npt.NDArray[np.uint8]:
            q = np.full((self.rows, self.num_blocks, 32), (1 << self.bits) - 1, dtype=np.uint8)
            q[self.rows // 2 :] = 0
            return q

    for has_zero_points in (False, True):
        weights = Extreme(40, 128, bits, has_zero_points=has_zero_points)
        for sign in (1, -1):
            a = np.full((9, 128), 3.0 * sign, dtype=np.float32)
            assert_product(multiply(weights, a, accuracy_level=accuracy_level), a, weights)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("accuracy_level", LEVELS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(bits: int, accuracy_level: int) -> None:
    weights = Weights(333, 576, bits)
    a = activations(70, 576)
    whole = multiply(weights, a, accuracy_level=accuracy_level)
    for count in (1, 2, 3, 8, 16, 17, 64):
        part = multiply(weights, a[:count], accuracy_level=accuracy_level, threads=count % 2 + 1)
        assert np.array_equal(part, whole[:count])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero_points", [False, True])
def test_product_equals_onnx_runtime_on_the_same_numbers(bits: int, has_zero_points: bool) -> None:
    weights = Weights(
        48, 160, bits, 32, "float32", has_zero_points=has_zero_points, whole_zero_points=True
    )
    a = activations(9, 160)
    zero_points = weights.zero_points()
    packed = None
    if zero_points is not None:
        packed = zero_points.astype(np.uint8)
        if bits == 4:
            padded = np.pad(packed, ((0, 0), (0, packed.shape[1] % 2)))
            packed = padded[:, 0::2] | (padded[:, 1::2] << 4)
        packed = packed.reshape(-1)
    q = weights.quantized().reshape(weights.rows, -1)
    packed_rows = q if bits == 8 else q[:, 0::2] | (q[:, 1::2] << 4)
    theirs = one_node.run(
        "MatMulNBits",
        {
            "A": a,
            "B": packed_rows.reshape(weights.rows, weights.num_blocks, -1),
            "scales": weights.scales().reshape(-1),
            "zero_points": packed,
        },
        weights.attributes | {"accuracy_level": 1},
        domain=names.ORT_DOMAIN,
    )
    ours = multiply(weights, a, accuracy_level=1)
    assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("scale_type", ["float16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("columns", [1, 33, 300])
def test_gathered_rows_are_the_weights(
    block_size: int, scale_type: str, bits: int, has_zero_points: bool, columns: int
) -> None:
    weights = Weights(50, columns, bits, block_size, scale_type, has_zero_points)
    indices = np.random.default_rng(3).integers(-50, 50, (3, 13))
    actual = gather(weights, indices)
    assert actual.shape == (3, 13, columns)
    assert np.allclose(actual, weights.dense()[indices], rtol=1e-6, atol=1e-7)


def gather(weights: Weights, indices: npt.NDArray[np.int64]) -> npt.NDArray:
    return one_node.run(
        "GatherBlockQuantized",
        {
            "data": weights.data(),
            "indices": indices,
            "scales": weights.grouped_scales(),
            "zero_points": weights.grouped_zero_points(),
        },
        weights.attributes,
        threads=2,
    )


def test_gather_takes_any_shape_of_indices() -> None:
    weights = Weights(5, 40)
    assert gather(weights, np.array(3)).shape == (40,)
    assert gather(weights, np.zeros((2, 0), dtype=np.int64)).shape == (2, 0, 40)
