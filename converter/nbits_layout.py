"""Where the numbers of a quantised weight [N, K] lie in its tensors.

| | kvconv's operators | com.microsoft's |
|---|---|---|
| q | uint8 [ceil(N / 16), words, 16, 4] | uint8 [N, num_blocks, block_size * bits / 8] |
| scales | [ceil(N / 16), num_blocks, 16] | [N, num_blocks] |
| zero points | as scales, any number | uint8, two to a byte where bits is 4 |

kvconv's kernels multiply 16 rows at once, a row to each lane of a vector. So rows come in groups of
16, and what a vector loads lies together: 32 bits of each row, a word, which are 4 weights of 8
bits, or 8 of 4 bits with the first four in the low halves of its bytes. Rows that fill up the last
group are zeros.

ONNX Runtime's GatherBlockQuantized reads q as it is, with the last axis quantised; its scales and
zero points have q's rank and are not packed, so they are stored twice there.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Part = Literal["q", "scales", "zero_points", "row_scales", "row_zero_points"]
"""A tensor of a weight; those named row_ are what com.microsoft's gather reads."""
Numbers = npt.NDArray[Any]
GROUP_ROWS = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a weight's tensors, and how they are filled.

    Attributes:
        rows: N.
        num_blocks: Blocks of a row.
        block_size: Weights of a block.
        bits: 8 or 4.
        grouped: Whether kvconv's operators read it, by groups of 16 rows.
    """

    rows: int
    num_blocks: int
    block_size: int
    bits: int
    grouped: bool

    def sizes(self, part: Part) -> list[int]:
        """Return the shape of a tensor."""
        width = self.num_blocks * self.block_size * self.bits // 8
        if self.grouped:
            groups = -(-self.rows // GROUP_ROWS)
            return {
                "q": [groups, width // 4, GROUP_ROWS, 4],
                "scales": [groups, self.num_blocks, GROUP_ROWS],
                "zero_points": [groups, self.num_blocks, GROUP_ROWS],
            }[part]
        packed = self.num_blocks if self.bits == 8 else -(-self.num_blocks // 2)
        return {
            "q": [self.rows, self.num_blocks, width // self.num_blocks],
            "scales": [self.rows, self.num_blocks],
            "zero_points": [self.rows, packed],
            "row_scales": [self.rows, self.num_blocks, 1],
            "row_zero_points": [self.rows, self.num_blocks, 1],
        }[part]

    def put(self, part: Part, tensor: Numbers, start: int, numbers: Numbers) -> None:
        """Put the numbers of some rows into a tensor.

        Args:
            part: Which tensor it is.
            tensor: It, of the shape that `sizes` says.
            start: First of the rows.
            numbers: [rows, num_blocks * block_size] uint8 for q, else [rows, num_blocks].
        """
        count = len(numbers)
        if not self.grouped:
            if self.bits == 4 and part in ("q", "zero_points"):
                numbers = _pairs(numbers)
            tensor[start : start + count] = numbers.reshape(count, *tensor.shape[1:])
            return
        if part == "q":
            numbers, tensor = _words(numbers, self.bits), tensor.view("<u4")[..., 0]
        rows = np.arange(start, start + count)
        tensor[rows // GROUP_ROWS, :, rows % GROUP_ROWS] = numbers


def _words(q: Numbers, bits: int) -> npt.NDArray[np.uint32]:
    """Put 4 or 8 numbers of a row into each word: uint8 [n, ..] -> uint32 [n, words]."""
    if bits == 4:
        halves = q.reshape(len(q), -1, 2, 4)
        q = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return np.ascontiguousarray(q).reshape(len(q), -1).view("<u4")


def _pairs(numbers: Numbers) -> Numbers:
    """Put two 4-bit numbers of a row into each byte, the first into the low half."""
    if numbers.shape[1] % 2:
        numbers = np.pad(numbers, ((0, 0), (0, 1)))
    packed: Numbers = numbers[:, ::2] | (numbers[:, 1::2] << 4)
    return packed
