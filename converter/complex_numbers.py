"""Complex numbers as pairs of real ones, while a decoder is traced: ONNX has no complex tensors.

Some decoders (llama4, deepseek_v2) rotate queries and keys as complex numbers. Within
`RealArithmetic` the functions that make complex tensors return a `_Complex` instead, which the
model's own code then multiplies, indexes and turns back. So what is traced is

    out[2i]     = x[2i] * cos - x[2i + 1] * sin
    out[2i + 1] = x[2i] * sin + x[2i + 1] * cos

which rule `rotary` knows as the interleaved style.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch.overrides import TorchFunctionMode

from kvconv.errors import UnsupportedModelError


class RealArithmetic(TorchFunctionMode):
    """A context in which no complex tensor is made."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call one function of PyTorch, or ours in its place."""
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


class _Complex:
    """A complex tensor: two real ones of one shape."""

    def __init__(self, real: torch.Tensor, imag: torch.Tensor) -> None:
        self.real, self.imag = real, imag

    def __mul__(self, other: "_Complex | torch.Tensor | float") -> "_Complex":
        if not isinstance(other, _Complex):
            return _Complex(self.real * other, self.imag * other)
        return _Complex(
            self.real * other.real - self.imag * other.imag,
            self.real * other.imag + self.imag * other.real,
        )

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> "_Complex":
        return _Complex(self.real[index], self.imag[index])

    def unsqueeze(self, dim: int) -> "_Complex":
        """Insert a dimension, as `torch.Tensor.unsqueeze` does."""
        return _Complex(self.real.unsqueeze(dim), self.imag.unsqueeze(dim))

    def to(self, device: torch.device | str) -> Self:
        """Return self: a decoder is traced on one device."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the two tensors are."""
        return self.real.device

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse a function of PyTorch that `RealArithmetic` does not replace."""
        raise UnsupportedModelError(
            f"The model uses {getattr(func, '__name__', func)} on complex numbers, which ONNX does "
            f"not have; kvconv models rotary embeddings written as a complex product only."
        )


def _polar(absolute: torch.Tensor, angle: torch.Tensor) -> _Complex:
    return _Complex(absolute * angle.cos(), absolute * angle.sin())


def _view_as_complex(pairs: torch.Tensor) -> _Complex:
    # Not pairs[..., 0]: that becomes a Gather, behind which rule `rotary` does not look.
    real, imag = pairs.split(1, dim=-1)
    return _Complex(real.squeeze(-1), imag.squeeze(-1))


def _view_as_real(number: _Complex) -> torch.Tensor:
    return torch.stack((number.real, number.imag), dim=-1)


_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.polar: _polar,
    torch.complex: _Complex,
    torch.view_as_complex: _view_as_complex,
    torch.view_as_real: _view_as_real,
}
