"""A weight that is to be quantised, where PyTorch keeps it: read in chunks, never copied whole."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from kvconv.converter.linear_weight import Rows
from kvconv.errors import ExportError

_CHUNK_WEIGHTS = 2**21
_SAMPLED_ROWS = 256


class FloatWeight:
    """A weight [N, K], float32 or float16.

    Attributes:
        name: Its name in the checkpoint.
        out_features: N.
        in_features: K.
        dtype: Float type of the weight and of what it multiplies.
        reach: How far from zero the farthest of its numbers is.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Rows],
        *,
        out_features: int,
        in_features: int,
        dtype: ir.DataType,
    ) -> None:
        """Read the weight once.

        Args:
            name: See the attributes, as for those not told here.
            rows: Give views of PyTorch's memory, [.., K]; one below the other they are the weight.
            out_features: N.
            in_features: K.
            dtype: FLOAT or FLOAT16.

        Raises:
            ExportError: The weight holds infinities or NaN.
        """
        self.name, self.out_features, self.in_features = name, out_features, in_features
        self.dtype = dtype
        self._rows = rows
        self.reach = 0.0
        for chunk in self.chunks():
            low, high = map(float, as_tensor(chunk).float().aminmax())
            if not np.isfinite([low, high]).all():
                raise ExportError(
                    f"The weight {name} holds infinities or NaN, so it cannot be quantised. Check "
                    f"the checkpoint, or export without --weights."
                )
            self.reach = max(self.reach, -low, high)

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """Give views of PyTorch's memory, one below the other; none has very many weights."""
        step = max(1, _CHUNK_WEIGHTS // self.in_features)
        for rows in self._rows:
            memory = rows()
            for start in range(0, len(memory), step):
                yield memory[start : start + step]

    def sample(self) -> torch.Tensor:
        """Return rows at equal distances, at least 256 if there are so many: float32 [.., K]."""
        step = max(1, self.out_features // _SAMPLED_ROWS)
        sampled, start = [], 0
        for rows in self._rows:
            memory = rows()
            sampled.append(as_tensor(memory[-start % step :: step]).float())
            start += len(memory)
        return torch.cat(sampled)


def as_tensor(rows: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over the same memory, or over a copy if torch cannot read it as it is."""
    return torch.from_numpy(np.require(rows, requirements=["C", "W"]))
