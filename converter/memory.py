"""Gives this process's freed memory back to the system."""

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
