"""How far a result may be from the float64 oracle, and why, per dtype of the activations."""

import numpy as np
import numpy.typing as npt

TOLERANCES: dict[str, tuple[float, float]] = {
    # Sums of up to a few thousand products of size 1 in float32 (2^-24 each), and an exp that is
    # right to about 1e-7.
    "float32": (2e-5, 2e-5),
    # The result itself is rounded to 11 bits (2^-11 = 5e-4); scores and sums are float32.
    "float16": (2e-3, 1e-3),
    # Queries that meet quantised keys are rounded to 2^-16 of their largest number, which moves a
    # score of size 1 by 3e-5, up to three times that in a few of thousands. Weights of quantised
    # values are rounded alike, by 1e-5 of a tile's largest, each by itself.
    "16-bit queries": (1e-4, 1e-4),
    # 8 bits (2^-8 = 4e-3).
    "bfloat16": (1.6e-2, 8e-3),
}
"""dtype -> (relative, absolute)."""


def assert_close(actual: npt.NDArray, expected: npt.NDArray, dtype: str, name: str) -> None:
    """Compare two arrays; on failure name the tensor, the worst index and both values.

    Args:
        actual: What kvconv computed.
        expected: Same shape; NaN must meet NaN.
        dtype: Key of TOLERANCES.
        name: What the tensor is called in the message.
    """
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    rtol, atol = TOLERANCES[dtype]
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    wrong = np.isnan(a) != np.isnan(b)
    with np.errstate(invalid="ignore"):
        excess = np.where(a == b, 0.0, np.abs(a - b) - rtol * np.abs(b))
    excess = np.where(wrong, np.inf, np.nan_to_num(excess, nan=0.0, posinf=np.inf))
    if excess.size == 0 or excess.max() <= atol:
        return
    index = np.unravel_index(int(excess.argmax()), excess.shape)
    where = tuple(int(i) for i in index)
    raise AssertionError(
        f"{name}{list(where)} is {a[index]!r}, expected {b[index]!r} "
        f"({dtype}: rtol {rtol}, atol {atol}); {int((excess > atol).sum())} of {a.size} differ"
    )
