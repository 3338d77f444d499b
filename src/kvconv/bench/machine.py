"""What the machine allows: how fast memory can be read."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BYTES = 512 * 2**20
_REPEATS = 6


def usable_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_bandwidth(threads: int) -> float:
    """Measure how fast memory is read, in bytes per second: the roof of a decode step.

    Each thread takes the maximum of its own part of 512 MB, far more than caches hold; the best of
    six rounds counts.

    Args:
        threads: Threads, >= 1.
    """
    parts = np.array_split(np.ones(_BYTES // 4, np.float32), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_REPEATS):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - started)
    return _BYTES / min(seconds)
