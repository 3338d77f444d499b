"""What every peer's driver shares: requests come as JSON lines on stdin, samples leave on stdout.

A request holds `ids` (a list of rows, all of one length) and `gen`. The answer is one sample: when
the first new id of every row was on the host, and when `gen` more were. Only the standard library
and numpy are imported here, so that every peer's environment can run it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def set_threads(threads: int) -> None:
    """Tell OpenMP pools their size; before the peer is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Clock:
    """Notes when new ids are on the host; starts when it is made."""

    def __init__(self) -> None:
        reset = Path("/proc/self/clear_refs")  # "5": VmHWM begins again from what is resident
        reset.write_text("5")
        self.times: list[float] = []
        self.ids: list[int] = []
        self.prefill_peak_mb = 0.0
        self._busy, self._own = _busy_s(), sum(os.times()[:2])
        self.started = time.perf_counter()

    def tick(self, token_id: int) -> None:
        """Take the first row's new id; all other rows have theirs, too."""
        self.times.append(time.perf_counter())
        self.ids.append(int(token_id))
        if len(self.ids) == 1:
            self.prefill_peak_mb = _peak_mb()

    def sample(self) -> dict[str, Any]:
        """Return what the run took."""
        seconds = time.perf_counter() - self.started
        others = _busy_s() - self._busy - (sum(os.times()[:2]) - self._own)
        return {
            "prefill_s": self.times[0] - self.started,
            "decode_s": self.times[-1] - self.times[0],
            "ids": self.ids,
            "prefill_peak_rss_mb": round(self.prefill_peak_mb, 1),
            "peak_rss_mb": round(_peak_mb(), 1),
            "other_cores": round(max(others / seconds, 0.0), 2),
        }


Run = Callable[[np.ndarray, int], Clock]
"""([batch, context] int64 ids, gen) -> the clock of a finished run of gen + 1 new ids per row."""


def serve(load: Callable[[], tuple[Run, dict[str, Any]]]) -> None:
    """Load the peer, say how it is set up, and answer requests until stdin ends.

    Args:
        load: Returns the peer's run and its settings.
    """
    # Libraries print to stdout; answers go to where it pointed.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    run, settings = load()
    answer({"settings": settings})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(run(np.array(request["ids"], np.int64), request["gen"]).sample())
        except Exception as error:  # what a peer cannot do is a result, too
            answer({"error": f"{type(error).__name__}: {error}"[:400]})


def _peak_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def _busy_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
