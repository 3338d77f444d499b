"""ALiBi that a model slices from a table is computed while a decoder is traced.

MPT builds numbers for its longest sequence and cuts the last ones off, at bounds that depend on the
length in a way that PyTorch cannot trace. They are slope * (slot - last slot) for any length.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_BUILDER = "build_mpt_alibi_tensor"


@contextlib.contextmanager
def computed_alibi(model: torch.nn.Module) -> Iterator[None]:
    """Make models with MPT's builder of ALiBi add numbers that fit whatever they are added to."""
    modules = [module for module in model.modules() if hasattr(module, _BUILDER)]
    for module in modules:
        setattr(module, _BUILDER, _computing(getattr(module, _BUILDER)))
    try:
        yield
    finally:
        for module in modules:
            delattr(module, _BUILDER)  # of the class it stays


def _computing(build: Any) -> Any:
    def build_two_slots(num_heads: int, _: int, *args: Any, **keywords: Any) -> _Alibi:
        return _Alibi(build(num_heads, 2, *args, **keywords))

    return build_two_slots


class _Alibi:
    """Stands for a table [num_attention_heads, 1, max_sequence_length] that is added to scores.

    Args:
        table: The table's last two slots, which hold -slope and 0.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.shape = table.shape
        self._slopes = -table[:, :, :1]

    def size(self, axis: int) -> int:
        """Return a length that no run is shorter than, so that nothing is to be cut off."""
        del axis
        return 0

    def __getitem__(self, index: Any) -> "_Alibi":
        """Cut nothing off: the sum does."""
        del index
        return self

    def __radd__(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [batch_size, num_attention_heads, sequence_length, total] with ALiBi."""
        total = scores.shape[-1]
        return scores + self._slopes * (torch.arange(total) - (total - 1))
