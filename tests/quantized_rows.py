"""The oracle of quantised caches: how a row is rotated, rounded, packed and read back.

Written for obviousness, one formula per step. `kind` is "int8", "int4" (values) or "int5" (the keys
of an int4 cache); bfloat16 scales are uint16 bits.
"""

import numpy as np
import numpy.typing as npt

from single_node import from_bfloat16, to_bfloat16

GROUP = 32
ZERO_POINTS = {"int8": 0, "int4": 8, "int5": 16}
NAN_BITS = 0x7FC0


def transform(x: npt.NDArray) -> npt.NDArray[np.float64]:
    """Multiply each block of the last axis by the Hadamard matrix of its size, normalised."""
    width = x.shape[-1]
    size = width & -width
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    with np.errstate(invalid="ignore", over="ignore"):
        blocks = x.astype(np.float64).reshape(*x.shape[:-1], width // size, size)
        return (blocks @ matrix / np.sqrt(size)).reshape(x.shape)


def row_size(kind: str, width: int) -> int:
    """Return the last dimension of a cache tensor of such rows."""
    groups = -(-width // GROUP)
    return {"int8": width, "int4": 16 * groups, "int5": 20 * groups}[kind]


def quantize(x: npt.NDArray, kind: str) -> tuple[npt.NDArray, npt.NDArray[np.uint16]]:
    """Round rotated rows.

    Args:
        x: [..., width].
        kind: See the module.

    Returns:
        What the cache stores, int8 or uint8 [..., row_size], and the scales [..., groups].
    """
    width = x.shape[-1]
    groups = -(-width // GROUP)
    padded = np.zeros((*x.shape[:-1], groups * GROUP), np.float32)
    padded[..., :width] = x
    padded = padded.reshape(*x.shape[:-1], groups, GROUP)
    zero = ZERO_POINTS[kind]

    finite = np.isfinite(padded).all(-1)
    numbers = np.where(finite[..., None], padded, np.float32(0))
    first = np.abs(numbers).argmax(-1)[..., None]
    largest = np.take_along_axis(numbers, first, -1)[..., 0]
    scale = np.abs(largest) / np.float32(127) if kind == "int8" else largest / np.float32(-zero)
    bits = to_bfloat16(scale)
    bits = np.where(np.abs(from_bfloat16(bits)) < 2.0**-126, np.uint16(0), bits)
    rounded = from_bfloat16(bits)
    inverse = np.divide(1, rounded, out=np.zeros_like(rounded), where=rounded != 0)
    low, high = (-127, 127) if kind == "int8" else (-zero, zero - 1)
    codes = np.clip(np.rint(numbers * inverse[..., None]), low, high).astype(np.int64) + zero
    return pack(codes, kind, width), np.where(finite, bits, np.uint16(NAN_BITS))


def pack(codes: npt.NDArray[np.int64], kind: str, width: int) -> npt.NDArray:
    """Store codes [..., groups, 32] as the cache does."""
    *lead, groups, _ = codes.shape
    if kind == "int8":
        return codes.reshape(*lead, groups * GROUP)[..., :width].astype(np.int8)
    low = codes & 15
    nibbles = (low[..., :16] | low[..., 16:] << 4).astype(np.uint8)
    nibbles = nibbles.reshape(*lead, 16 * groups)
    if kind == "int4":
        return nibbles
    fifth = np.packbits(codes >> 4, axis=-1, bitorder="little").reshape(*lead, 4 * groups)
    return np.concatenate([nibbles, fifth], axis=-1)


def dequantize(
    stored: npt.NDArray, scales: npt.NDArray[np.uint16], kind: str, width: int
) -> npt.NDArray[np.float32]:
    """Return the rotated rows [..., width] that are stored."""
    lead, groups = stored.shape[:-1], scales.shape[-1]
    codes = np.zeros((*lead, groups, GROUP), np.int64)
    if kind == "int8":
        codes.reshape(*lead, groups * GROUP)[..., :width] = stored
    else:
        nibbles = stored[..., : 16 * groups].reshape(*lead, groups, 16).astype(np.int64)
        codes[..., :16], codes[..., 16:] = nibbles & 15, nibbles >> 4
    if kind == "int5":
        fifth = stored[..., 16 * groups :].reshape(*lead, groups, 4)
        codes += 16 * np.unpackbits(fifth, axis=-1, bitorder="little").astype(np.int64)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = (codes - ZERO_POINTS[kind]).astype(np.float32) * from_bfloat16(scales)[..., None]
    return numbers.reshape(*lead, groups * GROUP)[..., :width]
