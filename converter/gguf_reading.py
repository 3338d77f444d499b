"""Makes transformers read a GGUF file once and in little memory.

transformers parses the file anew for the config, the tokenizer and the weights, gguf-py wraps each
vocabulary entry in a memory map object of its own, and a tensor's name map is built for every
module: on a small model that takes longer than the weights. Inside `fast_reading`
the same public functions remember and work in slices; their results do not change.
"""

import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvconv.converter.swapped import swapped

_SLICE_BYTES = 16 * 1024 * 1024


def fast_reading(*, remember: bool) -> AbstractContextManager[None]:
    """Replace gguf-py's slow functions for as long as the block runs.

    Args:
        remember: Keep what was read of a file for its next reader in the block. A large
            vocabulary then stays in memory beside everything that is made of it.
    """
    return swapped(
        gguf,
        GGUFReader=functools.cache(_PlainReader) if remember else _PlainReader,
        get_tensor_name_map=functools.cache(gguf.get_tensor_name_map),
        dequantize=functools.partial(_dequantize, gguf.dequantize),
    )


def metadata(path: Path, key: str) -> str | None:
    """Return one text of a GGUF file's metadata; None if it has no such key."""
    field = gguf.GGUFReader(str(path)).get_field(key)
    return None if field is None else str(field.contents())


class _PlainReader(gguf.GGUFReader):
    """Slices the mapped file as a plain array: a numpy.memmap slice costs ten times as much."""

    _mapped: npt.NDArray[np.uint8]

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The mapped file."""
        return self._mapped

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._mapped = np.asarray(mapped)


def _dequantize(dequantize: Any, data: npt.NDArray[Any], qtype: Any) -> npt.NDArray[np.float32]:
    """Dequantise a few rows at a time, so that only the result is ever whole.

    Args:
        dequantize: gguf-py's own function.
        data: [rows, ...] in the file's type.
        qtype: The file's quantisation.
    """
    num_slices = min(len(data), data.nbytes // _SLICE_BYTES + 1) if data.ndim > 1 else 1
    if num_slices == 1:
        return np.asarray(dequantize(data, qtype), dtype=np.float32)
    slices = np.array_split(data, num_slices)
    first = dequantize(slices[0], qtype)
    result = np.empty((len(data), *first.shape[1:]), dtype=np.float32)
    start = 0
    for part in slices:
        result[start : start + len(part)] = dequantize(part, qtype)
        start += len(part)
    return result
