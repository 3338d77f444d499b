"""Memory of this machine and of this process, as far as the system tells; MB are 10^6 bytes."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC, _CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers of a hierarchy -> its files that say the limit and what is used, and which part of
that is file cache that the kernel gives up first."""


def physical_memory_bytes() -> int | None:
    """Return the memory this machine has; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def free_memory_bytes() -> int | None:
    """Return what can be allocated before the system runs out; None where it does not tell.

    On Linux what the kernel thinks is available, and within the limits of the control groups that
    this process is in (containers); what only caches files counts as free. Elsewhere all memory of
    the machine, which is at least as much.
    """
    available = _meminfo_bytes("MemAvailable")
    if available is None:
        return physical_memory_bytes()
    return max(0, min([available, *_control_group_bytes()]))


def _meminfo_bytes(name: str) -> int | None:
    try:
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _control_group_bytes() -> Iterator[int]:
    """Yield what each control group around this process leaves; cgroup v2, and v1's memory."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = _CONTROL_GROUPS / controllers
        limit, usage, cached = _FILES[controllers]
        # In a container the path may be the host's, which is not there: the root has the limit.
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                try:
                    statistics = (folder / "memory.stat").read_text().split()
                    file_cache = int(statistics[statistics.index(cached) + 1])
                    most = int((folder / limit).read_text())
                    yield most - int((folder / usage).read_text()) + file_cache
                except (OSError, ValueError):  # not there; or "max", which is no limit
                    continue


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


def release_memory() -> None:
    """Give freed memory back to the system: cycles keep weights alive, and glibc keeps pages."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _getrusage_mb(who: str) -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(getattr(resource, who)).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
