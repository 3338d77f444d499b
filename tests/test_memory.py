"""Memory of this process."""

import sys

import numpy as np
import pytest

from kvconv.memory import peak_rss_mb, reset_peak_rss


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs")
def test_peak_counts_from_the_reset():
    memory = np.ones(300_000_000, np.uint8)
    high = peak_rss_mb()
    del memory
    assert min(high, peak_rss_mb()) > 300
    assert reset_peak_rss()
    assert peak_rss_mb() < high - 200


def test_reset_that_is_not_possible_says_so(monkeypatch):
    def refused(self, text):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.write_text", refused)
    assert not reset_peak_rss()
