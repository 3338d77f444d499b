"""The arrays of a run: checked before anything runs, or computed where the caller gives none."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def int64_array(name: str, value: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return whole numbers as a contiguous array: the caller's own where it is one.

    Raises:
        TypeError: They are no whole numbers.
    """
    array = np.asarray(value)
    if array.size > 0 and array.dtype.kind not in "iub":
        raise TypeError(f"{name} is {array.dtype}; it must hold integers")
    return np.ascontiguousarray(array, np.int64)


def int64_of_shape(
    name: str, value: npt.ArrayLike, shape: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Return whole numbers as a contiguous array of a shape.

    Raises:
        TypeError: They are no whole numbers.
        ValueError: They have another shape.
    """
    array = int64_array(name, value)
    if array.shape != shape:
        raise ValueError(f"{name} is {array.shape}; it must be {shape}")
    return array


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that are not in [0, vocab_size): some nodes would take them without a word.

    Raises:
        ValueError: One is not.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name} holds {token_id}; token ids are at least 0 and below vocab_size "
                f"{vocab_size}"
            )


def check_out(name: str, array: npt.NDArray[np.float32], shape: tuple[int, ...]) -> None:
    """Refuse an array that no run could write logits of a shape into.

    Raises:
        ValueError: It is not contiguous, not float32, or of another shape.
    """
    if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
        order = "contiguous" if array.flags.c_contiguous else "not contiguous"
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}, {order}; it must be float32 {shape}, "
            f"contiguous"
        )


def count_positions(attention_mask: npt.NDArray[np.int64], past: int) -> npt.NDArray[np.int64]:
    """Return how many tokens that may be attended to come before each new one.

    Args:
        attention_mask: [batch_size, total_sequence_length] int64, 0 = not attended.
        past: Tokens in the cache before the new ones.

    Returns:
        [batch_size, total_sequence_length - past] int64.
    """
    attended = attention_mask != 0
    before = attended[:, :past].sum(axis=1, keepdims=True)
    positions = before + np.cumsum(attended[:, past:], axis=1) - 1
    return np.asarray(np.maximum(positions, 0))
