"""The roofs: what is counted, not how fast it is."""

import itertools

import numpy as np
import pytest

from kvconv.bench import roofs


@pytest.mark.parametrize("threads", [1, 3])
def test_read_counts_the_bytes_that_it_sums(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    roof = roofs.MemoryRoof(threads, num_bytes=2**22)
    sums = []
    matmul = np.matmul
    monkeypatch.setattr(
        np, "matmul", lambda *operands: sums.append(matmul(*operands).sum(dtype=np.float64))
    )
    monkeypatch.setattr(roofs.time, "perf_counter", itertools.count().__next__)
    num_bytes = roof.read()
    assert len(sums) == threads
    assert num_bytes == 4 * sum(sums)  # of ones, each counted once
    assert 0.98 * 2**22 <= num_bytes <= 2**22
