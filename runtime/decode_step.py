"""The decode step: one token per row, again and again, with little beside the graph itself.

A step of a small quantised model takes few milliseconds, and leaves Python's own code and data cold
in the caches: checking, counting and binding anew took 0.25 ms of each.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnxruntime

from kvconv import names
from kvconv.runtime.kv_cache import KVCache


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
        self._logits = logits
        self._execute = execute
        self._ids = cache.arrays.bind_input(
            names.INPUT_IDS, np.zeros((cache.batch_size, 1), np.int64)
        )
        positions = attention_mask[:, : cache.length].sum(axis=1, keepdims=True)
        if has_positions:
            positions = cache.arrays.bind_input(names.POSITION_IDS, positions)
        self._positions = positions
        cache.arrays.bind_input(names.NUM_LOGITS_TO_KEEP, np.array(1, np.int64))
        cache.arrays.bind_output(names.LOGITS, logits)

    def run(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Append a token to each row and return the logits of what follows.

        Args:
            token_ids: [batch_size] int64, of the vocabulary.

        Returns:
            The same array each time.

        Raises:
            CacheFullError: The cache is full; nothing has run.
        """
        cache = self._cache
        if cache.length != self._length:
            raise ValueError(
                f"The cache holds {cache.length} tokens and not {self._length}: it was run or "
                f"rewound by something else. Make a new step."
            )
        cache.check_room(1)
        binding = cache.prepare_run(1)
        self._ids[:, 0] = token_ids
        mask = np.ascontiguousarray(self._mask[:, : self._length + 1])
        binding.bind_cpu_input(names.ATTENTION_MASK, mask)
        self._execute(binding)
        cache.commit_run(1)
        self._positions += 1
        self._length += 1
        return self._logits
