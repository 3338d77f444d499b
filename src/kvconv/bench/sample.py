"""One timed run: a prefill and the decode behind it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run took.

    Attributes:
        context: Prompt tokens per row.
        batch: Rows.
        prefill_s: From the call until the first new id of every row is on the host.
        decode_s: From there until the last id of every row.
        token_ids: New ids of the first row, the one of the prefill included.
        prefill_peak_rss_mb: Most resident memory until the first new id, in MB (10^6 bytes); None
            where it cannot be told apart from what came before.
        peak_rss_mb: The same until the last id.
        other_cores: Cores that other processes kept busy meanwhile; None where unknown.
    """

    context: int
    batch: int
    prefill_s: float
    decode_s: float
    token_ids: tuple[int, ...]
    prefill_peak_rss_mb: float | None
    peak_rss_mb: float | None
    other_cores: float | None

    @property
    def num_decoded(self) -> int:
        """New ids of a row behind the first."""
        return len(self.token_ids) - 1

    def without_memory(self) -> "Sample":
        """Return the same without its memory, which was not that of one bundle alone."""
        return replace(self, prefill_peak_rss_mb=None, peak_rss_mb=None)


class Load:
    """Cores that other processes kept busy in a span of time; `cores` is None where unknown."""

    def __init__(self) -> None:
        self.cores: float | None = None

    @classmethod
    @contextmanager
    def during(cls) -> Iterator["Load"]:
        """Measure while the block runs; `cores` holds afterwards."""
        load = cls()
        busy, own, started = _busy_s(), _own_s(), time.perf_counter()
        yield load
        busy_after = _busy_s()
        if busy is not None and busy_after is not None:
            others = busy_after - busy - (_own_s() - own)
            load.cores = round(max(others / (time.perf_counter() - started), 0.0), 2)


def _busy_s() -> float | None:
    """Return the seconds that all cores together have worked since boot."""
    try:
        fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    # user nice system idle iowait irq softirq steal: neither idle nor waiting.
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system
