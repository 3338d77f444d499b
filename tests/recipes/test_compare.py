"""The comparison with other programs: its protocol with a driver, its lines and its table."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "recipes" / "compare"
# Answers with ids counted from the sum of the prompt; fails for batches.
DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from protocol import Clock, serve

def load():
    print("a library that prints to stdout\\n" * 10_000)
    def run(ids, gen):
        if len(ids) > 1:
            raise NotImplementedError("batch 1 only")
        clock = Clock()
        for step in range(gen + 1):
            clock.tick(ids.sum() + step)
        return clock
    return run, {"version": "1"}

serve(load)
"""


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("compare", "environments", "models", "table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("compare")


@pytest.fixture
def peer(compare):
    peer = compare.Peer("fake", [sys.executable, "-c", DRIVER, str(FOLDER / "peers")])
    yield peer
    peer.close()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="drivers read /proc")


def test_driver_answers_with_times_ids_and_memory(peer):
    assert peer.settings == {"version": "1"}
    sample = peer.run(np.array([[3, 4]]), 2)
    assert sample["ids"] == [7, 8, 9]
    assert 0 < sample["prefill_s"] < sample["prefill_s"] + sample["decode_s"]
    assert 1 < sample["prefill_peak_rss_mb"] <= sample["peak_rss_mb"]


def test_what_a_peer_cannot_do_is_its_result(peer):
    assert peer.run(np.zeros((2, 2), int), 1) == {"error": "NotImplementedError: batch 1 only"}
    assert peer.run(np.array([[1]]), 1)["ids"] == [1, 2]


def test_driver_that_ends_is_reported_with_its_last_words(compare):
    with pytest.raises(SystemExit, match=r"^broken ended with 3: s? +last words$"):
        compare.Peer(
            "broken",
            [
                *(sys.executable, "-c"),
                "import sys; sys.stderr.write('early words' + ' ' * 2000 + 'last words'); "
                "sys.exit(3)",
            ],
        )


def test_lines_keep_the_best_run_and_the_table_has_ratios(compare, capsys):
    arguments = argparse.Namespace(model=Path("m.gguf"), batch=2, threads=1, gen=2)

    def samples(factor):
        return [
            {
                "prefill_s": seconds * factor,
                "decode_s": 2 * seconds * factor,
                "ids": [1, 2, 3 if factor == 1 else 4],
                "prefill_peak_rss_mb": 10.0 + seconds,
                "peak_rss_mb": 20.0,
                "other_cores": 0.0 if factor == 1 else 0.5,
            }
            for seconds in (4.0, 2.0)
        ]

    lines = []
    for name, factor in (("kvconv b", 1), ("transformers", 3)):
        fake = argparse.Namespace(name=name, settings={})
        lines += compare.to_lines(fake, 8, samples(factor), arguments)
    prefill, decode = lines[:2]
    assert (prefill["what"], prefill["tokens_per_s"], prefill["peak_rss_mb"]) == ("prefill", 8, 14)
    assert (decode["what"], decode["tokens_per_s"], decode["runs"]) == ("decode", 1, [8, 4])
    json.dumps(lines)
    compare.print_table(lines)
    table = capsys.readouterr().out
    assert "| kvconv b | 8 [14] | 1 [20] |" in table
    assert "| transformers | 2.667! (3.00x) [14] | 0.3333! (3.00x) [20] |" in table
    assert "kvconv b: 8: 2 of 3" in table
    assert "busy with something else" in table


def test_table_of_runs_of_other_lengths_compares_the_first_ids_of_both(compare, capsys):
    point = {"what": "decode", "context": 8, "tokens_per_s": 1, "peak_rss_mb": 1, "other_cores": 0}
    compare.print_table(
        [
            {**point, "peer": "kvconv b", "first_ids": [1, 2, 3, 4, 5]},
            {**point, "peer": "transformers", "first_ids": [1, 2, 3]},
            {**point, "peer": "other", "first_ids": [1, 7]},
        ]
    )
    table = capsys.readouterr().out
    assert "kvconv b: 8: 3 of 3" in table
    assert "other: 8: 1 of 2" in table


def test_model_whose_build_was_interrupted_is_built_again(compare, monkeypatch, tmp_path):
    models = sys.modules["models"]
    ends = [KeyboardInterrupt(), None]
    monkeypatch.setattr(models, "python_of", lambda *_: "python")

    def build(command, **_):
        folder = Path(command[-1])
        folder.mkdir()
        (folder / "config.json").touch()
        if (end := ends.pop(0)) is not None:
            raise end
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(models.subprocess, "run", build)
    made = models.Models(Path("m.gguf"), tmp_path, tmp_path / "envs", "m")
    with pytest.raises(KeyboardInterrupt):
        made.hf()
    for _ in range(2):
        folder = made.hf()
        names = ["config.json", "model.safetensors"]
        assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in folder.parent.iterdir()] == ["m"]
    assert ends == []


def test_error_line_has_the_error(compare):
    arguments = argparse.Namespace(model=Path("m.gguf"), batch=2, threads=1, gen=2)
    fake = argparse.Namespace(name="x", settings={})
    (line,) = compare.to_lines(fake, 8, [{"error": "no"}], arguments)
    assert (line["what"], line["error"]) == ("error", "no")
