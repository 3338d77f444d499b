"""`kvconv inspect`: what it prints of a bundle."""

import json

import pytest
from click.testing import CliRunner

import tiny_decoders
from kvconv.cli import main
from kvconv.manifest import read_manifest

GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}


def inspect(*arguments):
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def gptj(exported, monkeypatch):
    """Export a model whose rotation stays in the graph."""
    monkeypatch.setitem(tiny_decoders.CONFIGS, "gptj", GPTJ)
    return exported("gptj")


def test_inspect_says_what_rewriting_left_alone(gptj):
    refusals = read_manifest(gptj.path).refusals
    assert refusals == gptj.refusals
    assert len(refusals) == 2
    assert all("cos and sin are read from" in refusal for refusal in refusals)
    lines = inspect(gptj.path).splitlines()
    assert [line for line in lines if line.startswith("left alone")] == [
        f"left alone    {refusal}" for refusal in refusals
    ]
    assert json.loads(inspect(gptj.path, "--json"))["refusals"] == list(refusals)


def test_inspect_of_a_bundle_with_nothing_left_alone_does_not_mention_it(exported):
    report = exported("llama")
    assert read_manifest(report.path).refusals == report.refusals == ()
    assert "left alone" not in inspect(report.path)
