"""`kvconv bench` on tiny bundles, in process: what it prints and refuses, never how fast."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvconv.bench import roofs
from kvconv.cli import main
from kvconv.manifest import read_manifest
from tiny_bundle import MAX_SEQUENCE_LENGTH, write_bundle

QUICK = ("--depths", "12,4", "--gen", "3", "--repeats", "2", "--threads", "1")
FIELDS = [
    "bundle", "threads", "what", "context", "batch", "tokens_per_s", "seconds", "peak_rss_mb",
    "runs", "ttft_ms", "tpot_ms", "bytes_per_token", "percent_of_read_bandwidth", "first_ids",
    "other_cores",
]  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> str:
    return str(write_bundle(tmp_path_factory.mktemp("cli") / "tiny", attention="flash"))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    little = functools.partial(roofs.MemoryRoof, num_bytes=2**20)
    monkeypatch.setattr("kvconv.bench.machine.MemoryRoof", little)
    monkeypatch.setattr("kvconv.bench.measurement._SETTLE_S", 0)


@pytest.fixture
def little_roofs(monkeypatch):
    def absent(threads):
        raise ModuleNotFoundError

    for name, replacement in (
        ("MemoryRoof", functools.partial(roofs.MemoryRoof, num_bytes=2**20)),
        ("OnnxRuntimeMatMul", functools.partial(roofs.OnnxRuntimeMatMul, size=64)),
        ("TorchMatMul", absent),
        ("_MAX_NODES", 2),
    ):
        monkeypatch.setattr(f"kvconv.bench.attention_op.{name}", replacement)


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


def lines_of(*arguments) -> list[dict]:
    result = bench(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_is_a_line_per_point_in_ascending_depths(bundle):
    lines = lines_of(bundle, *QUICK)
    assert [(line["what"], line["context"]) for line in lines] == [
        ("prefill", 4), ("decode", 4), ("prefill", 12), ("decode", 12),
    ]  # fmt: skip
    for line in lines:
        assert list(line) == FIELDS
        assert (line["bundle"], line["threads"], line["batch"]) == ("tiny", 1, 1)
        assert len(line["runs"]) == 2
        assert line["seconds"] == min(line["runs"]) > 0
        assert len(line["first_ids"]) == 4
        assert (line["ttft_ms"] is None) == (line["what"] == "decode")
        assert (line["tpot_ms"] is None) == (line["what"] == "prefill")
        assert (line["bytes_per_token"] is None) == (line["what"] == "prefill")
    if sys.platform == "linux":
        assert all(line["peak_rss_mb"] > 20 for line in lines)


def test_table_has_a_row_per_point(bundle):
    result = bench(bundle, *QUICK)
    assert result.exit_code == 0
    first, threads, header, *rows = result.stdout.splitlines()
    assert first == "tiny: tiny, flash, weights float32, cache float32"
    assert threads.startswith("1 threads; memory is read at ")
    assert header.split()[:3] == ["context", "batch", "tokens/s"]
    assert [row.split()[:2] for row in rows] == [
        ["prefill", "4"], ["decode", "4"], ["prefill", "12"], ["decode", "12"],
    ]  # fmt: skip


def test_prefill_chunk_changes_no_id(bundle):
    whole, chunked = (
        [line["first_ids"] for line in lines_of(bundle, *QUICK, "--prefill-chunk", size)]
        for size in ("12", "5")
    )
    assert whole == chunked


def test_against_gives_a_ratio_and_both_points(bundle, tmp_path):
    other = str(write_bundle(tmp_path / "other", attention="standard"))
    for line in lines_of(bundle, *QUICK, "--against", other):
        assert (line["bundle"], line["against"]["bundle"]) == ("tiny", "other")
        assert line["against"]["context"] == line["context"]
        assert line["first_ids"] == line["against"]["first_ids"]
        assert line["peak_rss_mb"] is None
        best, lowest, highest = (line["ratio"][key] for key in ("best", "lowest", "highest"))
        assert lowest <= highest
        assert best == pytest.approx(line["against"]["seconds"] / line["seconds"], rel=0.1)
    table = bench(bundle, *QUICK, "--against", other).stdout
    assert table.count("x (rounds ") == 4


def test_bundles_of_one_name_are_told_apart(bundle, tmp_path):
    other = str(write_bundle(tmp_path / "tiny"))
    (line, *_) = lines_of(bundle, *QUICK, "--against", other)
    assert (line["bundle"], line["against"]["bundle"]) == (bundle, other)


def test_profile_follows_the_points(bundle):
    lines = lines_of(bundle, *QUICK, "--profile")
    profiles = [line for line in lines if line["what"] == "profile"]
    assert [(line["phase"], line["context"]) for line in profiles] == [
        ("prefill", 4), ("decode", 4), ("prefill", 12), ("decode", 12),
    ]  # fmt: skip
    assert "FlashAttention" in {op["op"] for op in profiles[0]["ops"]}
    table = bench(bundle, *QUICK, "--profile").stdout
    assert "tiny, decode at 12: " in table
    assert "  FlashAttention\n" in table


def test_plot_is_written(bundle, tmp_path):
    chart = tmp_path / "speed.png"
    assert bench(bundle, *QUICK, "--plot", str(chart)).exit_code == 0
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "exit_code"), [("absent/speed.png", 1), ("speed.xyz", 2)])
def test_bad_plot_path_is_refused_before_anything_runs(bundle, tmp_path, name, exit_code):
    result = bench(bundle, *QUICK, "--plot", str(tmp_path / name))
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert "choose" in result.stderr
    assert ("Invalid value for --plot" in result.stderr) == (exit_code == 2)


def test_plot_without_matplotlib_says_what_to_install(bundle, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    result = bench(bundle, *QUICK, "--plot", str(tmp_path / "speed.png"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert 'pip install "kvconv[plot]"' in result.stderr


def test_depth_beyond_the_model_is_refused_before_anything_runs(bundle):
    result = bench(bundle, "--depths", f"4,{MAX_SEQUENCE_LENGTH}", "--threads", "1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"at most {MAX_SEQUENCE_LENGTH}" in result.stderr
    assert "Choose fewer tokens with --gen." in result.stderr


def test_batch_beyond_the_memory_is_refused_with_benchs_own_options(bundle):
    result = bench(bundle, *QUICK, "--batch", "1000000000000")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--batch and --depths" in result.stderr


def test_model_of_three_tokens_is_measured(bundle, tmp_path):
    small = shutil.copytree(bundle, tmp_path / "small")
    manifest = dataclasses.replace(read_manifest(small), max_sequence_length=3)
    manifest.write(small)
    lines = lines_of(str(small), "--depths", "1", "--gen", "1", "--threads", "1")
    assert [line["what"] for line in lines] == ["prefill", "decode"]


def test_closed_stdout_is_refused_before_anything_runs(bundle):
    command = [sys.executable, "-c", "from kvconv.cli import main; main()", "bench", bundle]
    script = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "Standard output is closed" in result.stderr


def test_unknown_bundle_is_an_error(tmp_path):
    result = bench(str(tmp_path / "absent"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "absent" in result.stderr


@pytest.mark.usefixtures("little_roofs")
def test_op_is_measured_without_a_bundle_against_its_roofs():
    options = ("--op", "--depths", "9", "--repeats", "1", "--threads", "1")
    lines = lines_of(*options)
    assert [line["case"]["what"] for line in lines] == ["decode", "prefill"] * 3 + [
        "decode", "decode", "prefill", "prefill",
    ] * 2  # fmt: skip
    assert [line["case"]["variant"] for line in lines] == ["plain"] * 6 + [
        "softcap", "head_sink", "softcap", "head_sink",
    ] + ["plain"] * 4  # fmt: skip
    assert [line["case"]["cache"] for line in lines] == ["float32"] * 10 + ["int8", "int4"] * 2
    for line in lines:
        is_decode = line["case"]["what"] == "decode"
        expected = {"read", "copy"} if is_decode else {"sgemm onnxruntime"}
        assert line["percent_of_roofs"].keys() == line["roofs"].keys() == expected
        assert line["speedup"] == pytest.approx(line["gqa_seconds"] / line["seconds"], rel=1e-3)
    table = bench(*options).stdout
    assert table.count("GB/s") == table.count("GFLOP/s") == 7
    assert table.count("x as fast as over float32") == 4
    assert "32/8 x 128  plain" in table


def test_op_that_cannot_be_measured_prints_no_header(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    result = bench("--op", "--depths", "8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "kvconv[export]" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        (), ("--op", "--profile"), ("--op", "--against", "x"), ("--op", "--batch", "1"),
        ("--op", "--gen", "64"), ("--op", "--prefill-chunk", "512"), ("--op", "--plot", "x.png"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_neither_bundle_nor_op_or_what_needs_a_bundle_is_a_usage_error(options):
    assert bench(*options).exit_code == 2


def test_bundle_and_op_together_are_a_usage_error(bundle):
    assert bench(bundle, "--op").exit_code == 2


@pytest.mark.parametrize(
    "option",
    [
        ("--gen", "0"), ("--repeats", "0"), ("--batch", "0"), ("--threads", "0"),
        ("--prefill-chunk", "0"), ("--depths", "128,"), ("--depths", "0"), ("--depths", "a"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_value_out_of_range_is_a_usage_error(bundle, option):
    assert bench(bundle, *option).exit_code == 2
