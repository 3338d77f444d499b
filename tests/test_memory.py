"""Memory of this process."""

import sys

import numpy as np
import pytest

from kvconv import memory
from kvconv.memory import peak_rss_mb, reset_peak_rss


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs")
def test_peak_counts_from_the_reset():
    block = np.ones(300_000_000, np.uint8)
    high = peak_rss_mb()
    del block
    assert min(high, peak_rss_mb()) > 300
    assert reset_peak_rss()
    assert peak_rss_mb() < high - 200


def test_reset_that_is_not_possible_says_so(monkeypatch):
    def refused(self, text):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.write_text", refused)
    assert not reset_peak_rss()


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Give a machine with 1000 kB available and no control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    1000 kB\n")
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path / "cgroup")
    return tmp_path


def write_group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_free_memory_is_what_the_kernel_says(system):
    assert memory.free_memory_bytes() == 1_024_000


def test_free_memory_is_within_the_tightest_control_group(system):
    (system / "proc/self/cgroup").write_text("0::/outer/inner\n")
    inner, outer = system / "cgroup/outer/inner", system / "cgroup/outer"
    write_group(inner, max="max\n", current="5\n", stat="anon 3\ninactive_file 2\n")
    write_group(outer, max="5000\n", current="4000\n", stat="anon 3000\ninactive_file 700\n")
    assert memory.free_memory_bytes() == 5000 - 4000 + 700


def test_free_memory_of_a_full_control_group_of_version_1_is_none_at_all(system):
    (system / "proc/self/cgroup").write_text("4:memory:/elsewhere\n3:cpuset:/\n")
    write_group(
        system / "cgroup/memory",
        limit_in_bytes="5000\n",
        usage_in_bytes="6000\n",
        stat="cache 9\ntotal_inactive_file 300\n",
    )
    assert memory.free_memory_bytes() == 0


def test_free_memory_without_meminfo_is_that_of_the_machine(system, monkeypatch):
    (system / "proc/meminfo").unlink()
    monkeypatch.setattr(memory, "physical_memory_bytes", lambda: 77)
    assert memory.free_memory_bytes() == 77
