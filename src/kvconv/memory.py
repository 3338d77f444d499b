"""Memory of this machine and of this process, as far as the system tells; MB are 10^6 bytes."""

import os
import sys
from pathlib import Path


def physical_memory_bytes() -> int | None:
    """Return the memory this machine has; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def peak_rss_mb() -> float | None:
    """Return this process's largest resident memory so far; None where unknown.

    On Linux from /proc: what getrusage says there includes the parent's memory at the fork.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    return _getrusage_mb("RUSAGE_SELF")


def reset_peak_rss() -> bool:
    """Let `peak_rss_mb` count from what is resident now; returns False where that is not possible.

    Linux only: "5" is what /proc/PID/clear_refs takes for it (proc(5)).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss_of_children_mb() -> float | None:
    """Return the largest resident memory of a process that this one started and that has ended.

    At least what this process had when it started it; None where unknown.
    """
    return _getrusage_mb("RUSAGE_CHILDREN")


def _getrusage_mb(who: str) -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(getattr(resource, who)).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
