"""What this machine has: cores, and how fast they read memory."""

import os

from kvconv.bench.roofs import MemoryRoof

_REPEATS = 6


def usable_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_bandwidth(threads: int) -> float:
    """Measure how fast memory is read, in bytes per second: the roof of a decode step.

    Args:
        threads: Threads, >= 1.
    """
    roof = MemoryRoof(threads)
    return max(roof.read() for _ in range(_REPEATS))
