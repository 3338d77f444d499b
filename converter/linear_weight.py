"""The weight of a MatMul, made from PyTorch's linear layers while it is written."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Rows = Callable[[], npt.NDArray[Any]]
"""Gives the weight of one linear layer as PyTorch keeps it, [out_features, in_features]."""


class LinearWeight(ir.LazyTensor):
    """A weight [in_features, out_features] that nothing holds: each read makes it anew.

    It is one linear layer's weight transposed, or those of several layers side by side, whose
    outputs then lie side by side as well.

    Attributes:
        rows: One per layer, in order.
        widths: out_features of each.
    """

    __slots__ = ("rows", "widths")

    def __init__(
        self,
        name: str,
        rows: Sequence[Rows],
        widths: Sequence[int],
        *,
        in_features: int,
        dtype: ir.DataType,
    ) -> None:
        self.rows, self.widths = tuple(rows), tuple(widths)
        super().__init__(
            self._stored, dtype=dtype, shape=ir.Shape([in_features, sum(widths)]), name=name
        )

    def torch_layout(self) -> npt.NDArray[Any]:
        """Return [out_features, in_features]; a view of PyTorch's memory if it is one layer."""
        parts = [rows() for rows in self.rows]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _stored(self) -> ir.TensorProtocol:
        if len(self.rows) == 1:
            return ir.Tensor(np.ascontiguousarray(self.rows[0]().T))
        stored, start = None, 0
        for rows, width in zip(self.rows, self.widths, strict=True):
            part = rows()
            if stored is None:
                stored = np.empty(self.shape.numpy(), part.dtype)
            stored[:, start : start + width] = part.T
            start += width
        assert stored is not None
        return ir.Tensor(stored)
