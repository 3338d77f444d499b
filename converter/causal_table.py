"""Causal masks that a module keeps as a table are computed while a decoder is traced.

GPT-Neo and its kind hold a bool buffer [1, 1, positions, positions], True where a query sees a
slot, and slice it in every run. In a graph that is a constant of some megabytes per layer, whose
meaning no rule can evaluate beyond its last position. A comparison of positions says the same.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_MIN_POSITIONS = 3


@contextlib.contextmanager
def computed_tables(model: torch.nn.Module) -> Iterator[None]:
    """Replace every buffer that is a causal table, windowed or not, and put them back."""
    replaced: list[tuple[torch.nn.Module, str, torch.Tensor, bool]] = []
    try:
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                window = _window(buffer)
                if window is not None:
                    is_persistent = name not in module._non_persistent_buffers_set
                    replaced.append((module, name, buffer, is_persistent))
                    delattr(module, name)
                    setattr(module, name, _CausalTable(buffer, window))
        yield
    finally:
        for module, name, buffer, is_persistent in replaced:
            delattr(module, name)
            module.register_buffer(name, buffer, persistent=is_persistent)


class _CausalTable:
    """Stands for a causal table where code slices its last two axes."""

    def __init__(self, table: torch.Tensor, window: int) -> None:
        self._table, self._window = table, window
        self._end = table.shape[3]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return [1, 1, rows, columns] bool; an index that is no such slice reads the table."""
        if not (isinstance(index, tuple) and len(index) == 4 and _is_all(*index[:2])):
            return self._table[index]
        rows, columns = (_positions(axis, self._end) for axis in index[2:])
        if rows is None or columns is None:
            return self._table[index]
        seen = columns <= rows[:, None]
        if self._window < self._end:
            seen &= columns > rows[:, None] - self._window
        return seen[None, None]


def _is_all(*axes: Any) -> bool:
    return all(axis == slice(None) for axis in axes)


def _positions(axis: Any, end: int) -> torch.Tensor | None:
    """Return the positions of a slice that counts up from a start that is not negative."""
    if not isinstance(axis, slice) or axis.step not in (None, 1):
        return None
    start = 0 if axis.start is None else axis.start
    stop = end if axis.stop is None else axis.stop
    # A traced length is no int, and never negative.
    if any(isinstance(bound, int) and bound < 0 for bound in (start, stop)):
        return None
    return torch.arange(start, stop)


def _window(table: torch.Tensor) -> int | None:
    """Return the slots that a query sees in a causal table, its own included; None for others."""
    if table.dtype != torch.bool or table.dim() != 4 or table.shape[:2] != (1, 1):
        return None
    rows, columns = table.shape[2:]
    if rows != columns or rows < _MIN_POSITIONS:
        return None
    window = int(table[0, 0, -1].sum())
    position = torch.arange(rows)
    expected = (position <= position[:, None]) & (position > position[:, None] - window)
    return window if window and torch.equal(table[0, 0], expected) else None
