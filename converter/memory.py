"""This process's memory: giving it back to the system, and how much it was at most."""

import ctypes
import gc
import sys


def release_memory() -> None:
    """Give freed memory back to the system: cycles keep weights alive, and glibc keeps pages."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def peak_memory_mb() -> float | None:
    """Return the largest resident memory so far of this process, or of one that it started.

    Returns:
        MiB; None on systems that do not say.
    """
    try:
        import resource
    except ImportError:
        return None
    whom = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = max(resource.getrusage(who).ru_maxrss for who in whom)
    return peak / (1024**2 if sys.platform == "darwin" else 1024)  # bytes there, KiB elsewhere
