"""The decode step: one token per row, again and again, with little beside the graph itself.

A step of a small quantised model takes few milliseconds, and reading the weights leaves Python's
own code and data cold in the caches: then a call into numpy or ONNX Runtime takes 15 to 80 us where
it took 1. So a step makes as few of them as can be.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime

from kvconv import names
from kvconv.runtime.kv_cache import KVCache
from kvconv.runtime.run_arrays import check_token_ids, count_positions

_MASKS_AT_ONCE = 16


class DecodeStep:
    """Runs one token per row; what keeps its shape is bound once and updated in place.

    Made by `Session.decode_step`. Valid as long as nothing else runs or rewinds the cache.

    Args:
        cache: Holds the tokens so far.
        attention_mask: [batch_size, cache.capacity] int64, 1 = attend, new tokens included.
        logits: [batch_size, 1, vocab_size] float32, contiguous: every run writes into it.
        has_positions: Whether the graph takes position ids.
        execute: Runs a binding.
    """

    def __init__(
        self,
        cache: KVCache,
        attention_mask: npt.NDArray[np.int64],
        logits: npt.NDArray[np.float32],
        *,
        has_positions: bool,
        execute: Callable[[onnxruntime.IOBinding], None],
    ) -> None:
        self._cache = cache
        self._length = cache.length
        self._mask = attention_mask
        self._masks: list[onnxruntime.OrtValue] = []  # of the next steps, last first
        self._slot_positions = count_positions(attention_mask, 0).data  # [batch_size, capacity]
        self._logits = logits
        self._vocab_size = logits.shape[2]
        self._execute = execute
        ids = positions = np.zeros((cache.batch_size, 1), np.int64)
        self._ids = _numbers(cache.arrays.bind_input(names.INPUT_IDS, ids))
        if has_positions:
            positions = cache.arrays.bind_input(names.POSITION_IDS, positions)
        self._positions = _numbers(positions)
        cache.arrays.bind_input(names.NUM_LOGITS_TO_KEEP, np.array(1, np.int64))
        cache.arrays.bind_output(names.LOGITS, logits)
        self._changes = cache.arrays.changes

    def run(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append a token to each row and return the logits of what follows.

        Args:
            token_ids: One per row, of the vocabulary.

        Returns:
            The same array each time.

        Raises:
            CacheFullError: The cache is full; nothing has run.
        """
        cache = self._cache
        if cache.length != self._length or cache.arrays.changes != self._changes:
            raise ValueError(
                f"The cache holds {cache.length} tokens, and {self._length} when this step last "
                f"ran; something else has run, rewound or bound it since. Make a new step."
            )
        if len(token_ids) != cache.batch_size:
            raise ValueError(
                f"There are {len(token_ids)} token_ids; the cache has {cache.batch_size} rows, "
                f"and each takes one"
            )
        check_token_ids("token_ids", token_ids, self._vocab_size)
        cache.check_room(1)
        binding = cache.prepare_run(1)
        for row, token_id in enumerate(token_ids):
            self._ids[row] = token_id
            self._positions[row] = self._slot_positions[row, self._length]
        if not self._masks:
            self._masks = self._next_masks()
        binding.bind_ortvalue_input(names.ATTENTION_MASK, self._masks[-1])
        self._execute(binding)
        cache.commit_run(1)
        self._masks.pop()
        self._length += 1
        return self._logits

    def _next_masks(self) -> list[onnxruntime.OrtValue]:
        """Make the masks of several steps at once: the second and later ones cost little."""
        widths = range(self._length + 1, self._mask.shape[1] + 1)[:_MASKS_AT_ONCE]
        masks = [np.ascontiguousarray(self._mask[:, :width]) for width in reversed(widths)]
        return [onnxruntime.OrtValue.ortvalue_from_numpy(mask) for mask in masks]


def _numbers(array: npt.NDArray[np.int64]) -> memoryview:
    """Return the numbers of a contiguous array, which may be written to, in one row."""
    return array.data.cast("B").cast("q")
