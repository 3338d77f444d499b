"""The arithmetic of gpu-check, and that it says in one line that there is no driver."""

import ctypes
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvconv.manifest import CacheLayer

FOLDER = Path(__file__).parents[2] / "recipes" / "gpu_check"
sys.path.insert(0, str(FOLDER))
goals = importlib.import_module("goals")
Result = goals.Result


def test_flops_of_causal_prefill_count_the_pairs_that_are_attended():
    pairs = sum(1 for query in range(5) for key in range(query + 1))
    assert goals.prefill_flops(5, 3, 64, 32) == 3 * pairs * 2 * (64 + 32)


@pytest.mark.parametrize(
    ("cache", "bytes_of_both"),
    [
        ("float32", 2 * 4 * 128),
        ("float16", 2 * 2 * 128),
        ("int8", 2 * (128 + 4 * 2)),
        ("int4", 128 // 2 + 128 // 8 + 4 * 2 + 128 // 2 + 4 * 2),
    ],
)
def test_bytes_of_decode_are_those_of_keys_values_and_scales(cache, bytes_of_both):
    layer = CacheLayer(8, 128, 128, cache)
    assert goals.decode_bytes(1000, 2, layer) == 1000 * 2 * 8 * bytes_of_both


def test_copies_fill_the_l2_cache_four_times_over():
    assert goals.num_copies(10, 100) == 40
    assert goals.num_copies(30, 100) == 14
    assert goals.num_copies(10**9, 100) == 2


def test_verdict_is_about_the_ratio_and_its_goal_alone():
    assert Result("prefill", 1.0, "ms", "SDPA", 0.9, 0.9).verdict == "ok"
    assert Result("prefill", 1.0, "ms", "SDPA", 0.89, 0.9).verdict == "MISSED"
    assert Result("prefill", 1.0, "ms", "SDPA", 0.89).verdict == ""
    assert Result("copy", 1.0, "GB/s").verdict == ""


def test_table_and_json_say_the_same():
    results = [
        Result("decode 8192", 0.125, "ms", "copy", 0.75, 0.8),
        Result("copy", 2900.0, "GB/s"),
    ]
    lines = goals.table(results).splitlines()
    assert lines[1].split() == ["decode", "8192", "0.125", "ms", "copy", "0.75x", "0.80x", "MISSED"]
    assert lines[2].split() == ["copy", "2900", "GB/s"]
    document = json.loads(goals.as_json({"gpu": "one"}, results, ["a"]))
    assert document["results"][0]["verdict"] == "MISSED"
    assert document["results"][1]["ratio"] is None
    assert (document["machine"], document["not_checked"]) == ({"gpu": "one"}, ["a"])


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="there is a driver here")
def test_without_a_driver_it_ends_in_one_line():
    done = subprocess.run(
        [sys.executable, FOLDER / "gpu_check.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no NVIDIA driver was found" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
