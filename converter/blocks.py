"""Turns a weight [N, K] into blocks of small integers, each block with a scale and a zero point.

    weight[n, k] ~ (q[n, k] - zero_point[n, k // block_size]) * scale[n, k // block_size]

q is unsigned, `bits` wide. Rounding between a block's minimum and maximum is only where the search
starts: a block whose values all lie on some grid (weights that were quantised before: GGUF) is met
exactly when the step is the grid's, and other blocks lose less when the outermost values are
clipped. So every block tries several steps, and for each the least-squares fit of scale and zero
point to the integers that it gave; the smallest squared error wins.
"""

from dataclasses import dataclass
from typing import Literal

import torch

ZeroPoints = Literal["none", "integer", "float"]
"""What a zero point may be: 2^(bits-1) for all blocks, any of the integers that q can be, or any
number."""

_CHUNK_WEIGHTS = 2**21
"""Weights searched at once, so that temporary memory stays near 100 MB."""
_STEPS = {
    ("float", 4): (15.0, 14.0, 16.0),
    ("integer", 4): (15.0, 14.0, 16.0),
    ("none", 4): (8.0, 7.0, 7.5, 8.5, 9.0),
    ("none", 8): (127.0, 128.0),
}
"""Zero points and bits -> into how many steps a range is divided, the likeliest first.

Between a block's minimum and maximum lie 15 steps of 4 bits; 14 leave one unused, 16 clip. Without
zero points the value farthest from zero is so many steps from it.
"""
_GRID_STEPS = (13.0, 12.0, 11.0, 10.0, 9.0, 8.0)
"""Tried too where many blocks are on a grid: the others may use fewer of its points."""
_MANY = 0.25
_EXACT = 1e-6
"""Squared error in parts of the squared range below which a block is on a grid."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight in blocks.

    Attributes:
        q: uint8 [N, num_blocks * block_size]; behind K lies what the last value gives.
        scales: [N, num_blocks], of the type asked for.
        zero_points: [N, num_blocks]: uint8, or the scales' type if they may be any number; None
            where all are 2^(bits-1).
    """

    q: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None

    def dequantize(self, bits: int) -> torch.Tensor:
        """Return float32 [N, num_blocks * block_size]."""
        rows, num_blocks = self.scales.shape
        q = self.q.reshape(rows, num_blocks, -1).float()
        zero = (
            2.0 ** (bits - 1) if self.zero_points is None else self.zero_points.float()[..., None]
        )
        return ((q - zero) * self.scales.float()[..., None]).reshape(rows, -1)


def quantize(
    weight: torch.Tensor,
    *,
    bits: int,
    block_size: int,
    zero_points: ZeroPoints,
    scale_dtype: torch.dtype,
) -> Blocks:
    """Quantise a weight.

    Args:
        weight: [N, K], finite. A last block that K does not fill is completed.
        bits: 4, or 8 without zero points.
        block_size: Weights of a row that share a scale.
        zero_points: What they may be.
        scale_dtype: Type of the scales, float16 or float32; errors are counted after rounding.

    Raises:
        ValueError: There is no search for such zero points with so many bits.
    """
    if (zero_points, bits) not in _STEPS:
        raise ValueError(
            f"bits is {bits} and zero_points is {zero_points!r}; bits is 4, or 8 with 'none'"
        )
    rows, in_features = weight.shape
    num_blocks = -(-in_features // block_size)
    parts = []
    for chunk in weight.split(max(1, _CHUNK_WEIGHTS // in_features)):
        blocks = chunk.float()
        if padding := num_blocks * block_size - in_features:
            blocks = torch.cat([blocks, blocks[:, -1:].expand(-1, padding)], dim=1)
        search = _Search(blocks.reshape(-1, block_size), bits, zero_points, scale_dtype)
        parts.append(search.run())
    q, scales, zeros = (torch.cat(part) for part in zip(*parts, strict=True))
    scales, zeros = scales.reshape(rows, num_blocks), zeros.reshape(rows, num_blocks)
    return Blocks(
        q=q.reshape(rows, num_blocks * block_size),
        scales=scales.to(scale_dtype),
        zero_points=None
        if zero_points == "none"
        else zeros.to(torch.uint8 if zero_points == "integer" else scale_dtype),
    )


class _Search:
    """The best scale and zero point of each of many blocks, [n, block_size] float32."""

    def __init__(
        self, blocks: torch.Tensor, bits: int, zero_points: ZeroPoints, scale_dtype: torch.dtype
    ) -> None:
        self._bits = bits
        self._levels = 2**bits - 1
        self._middle = 2.0 ** (bits - 1)
        self._zero_points = zero_points
        self._scale_dtype = scale_dtype
        self._blocks = blocks
        count = len(blocks)
        # Zeros, which stay where numbers are so small that no scale gives a finite error.
        self._error = torch.full((count,), torch.inf)
        self._q = torch.full(blocks.shape, int(self._middle), dtype=torch.uint8)
        self._scales = torch.ones(count)
        self._zeros = torch.full((count,), self._middle)

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [n, block_size] uint8, scales [n] and zero points [n] float32."""
        low, high = self._blocks.aminmax(dim=1)
        if self._zero_points != "float":
            low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        else:
            # A block far from zero, or of one value, has no zero point that float16 holds well.
            far = (high - low) * 64 < torch.maximum(low.abs(), high.abs())
            low, high = (
                torch.where(far, low.clamp(max=0.0), low),
                torch.where(far, high.clamp(min=0.0), high),
            )
        good_enough = _EXACT * (high - low).square()
        open_blocks = torch.arange(len(low))
        grid_steps = () if self._zero_points == "none" else _GRID_STEPS
        for steps in (*_STEPS[self._zero_points, self._bits], *grid_steps):
            on_grid = 1 - len(open_blocks) / len(low)
            if on_grid == 1 or (on_grid < _MANY and steps in grid_steps):
                break
            self._try(open_blocks, low, high, steps)
            open_blocks = open_blocks[self._error[open_blocks] > good_enough[open_blocks]]
        return self._q, self._scales, self._zeros

    def _try(
        self, chosen: torch.Tensor, low: torch.Tensor, high: torch.Tensor, steps: float
    ) -> None:
        blocks, low, high = self._blocks[chosen], low[chosen], high[chosen]
        if self._zero_points == "none":
            # The value farthest from zero decides the sign: 2^(bits-1) steps are on one side only.
            scales = -torch.where(high > -low, high, low) / steps
            self._fit(chosen, blocks, scales, torch.full_like(scales, self._middle))
            return
        scales = (high - low) / steps
        # With fewer steps than there are levels, the first levels; with more, the middle is met.
        zeros = -low / _not_zero(scales) - max(0.0, steps - self._levels) / 2
        if self._zero_points == "float":
            self._fit(chosen, blocks, scales, zeros)
            return
        for side in (zeros.floor(), zeros.ceil()):
            self._fit(chosen, blocks, scales, side.clamp(0, self._levels))

    def _fit(
        self, chosen: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> None:
        """Fit the scale (and a zero point that may be any number) to the integers it gives.

        Where these are all the same there is nothing to fit.
        """
        q = self._round(blocks, scales, zeros)
        centre = q.mean(dim=1) if self._zero_points == "float" else zeros
        q -= centre[:, None]
        spread = q.square().sum(dim=1)
        fitted = (q * blocks).sum(dim=1) / _not_zero(spread)
        scales = torch.where((spread == 0) | (fitted == 0), scales, fitted)
        if self._zero_points == "float":
            offsets = centre - blocks.mean(dim=1) / _not_zero(scales)
            zeros = torch.where(spread == 0, zeros, offsets)
        self._keep(chosen, blocks, scales, zeros)

    def _round(
        self, blocks: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> torch.Tensor:
        inverse = 1.0 / _not_zero(scales)
        return (blocks * inverse[:, None]).add_(zeros[:, None]).round_().clamp_(0, self._levels)

    def _keep(
        self, chosen: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> None:
        """Round to what is stored, and keep it where it is better than what was there."""
        scales = scales.to(self._scale_dtype).float()
        if self._zero_points == "float":
            zeros = zeros.to(self._scale_dtype).float()
        q = self._round(blocks, scales, zeros)
        error = (q - zeros[:, None]).mul_(scales[:, None]).sub_(blocks).square_().sum(dim=1)
        better = error < self._error[chosen]
        where = chosen[better]
        self._error[where] = error[better]
        self._q[where] = q[better].to(torch.uint8)
        self._scales[where] = scales[better]
        self._zeros[where] = zeros[better]


def _not_zero(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, torch.ones_like(values), values)
