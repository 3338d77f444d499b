"""ONNX Runtime's profile, read and split into phases."""

import json

import pytest

from kvconv.bench import profile
from kvconv.errors import KvconvError
from kvconv.runtime import Session
from tiny_bundle import write_bundle


def test_profile_counts_the_nodes_of_each_phase(tmp_path):
    bundle = write_bundle(tmp_path / "bundle", attention="flash")
    prefill, decode = profile(bundle, 20, gen=3, batch=2, threads=1, prefill_chunk=8)
    assert (prefill.phase, prefill.context, prefill.batch, prefill.runs) == ("prefill", 20, 2, 3)
    assert (decode.phase, decode.runs) == ("decode", 3)
    for phase in (prefill, decode):
        nodes = {op.op: op.nodes for op in phase.ops}
        assert nodes["FlashAttention"] == 1
        assert nodes["MatMul"] == 5
        assert nodes["outside the nodes"] == 0
        assert sum(op.percent for op in phase.ops) == pytest.approx(100, abs=1)
        assert sum(op.ms for op in phase.ops) == pytest.approx(phase.ms, abs=0.01)
        assert [op.ms for op in phase.ops] == sorted((op.ms for op in phase.ops), reverse=True)


@pytest.mark.parametrize("attention", ["flash", "standard", "gqa"])
def test_batch_is_profiled_in_every_flavour(tmp_path, attention):
    bundle = write_bundle(tmp_path / "bundle", attention=attention)
    chunk = None if attention == "gqa" else 8
    prefill, decode = profile(bundle, 20, gen=2, batch=2, threads=1, prefill_chunk=chunk)
    assert (prefill.runs, decode.runs) == (1 if attention == "gqa" else 3, 2)


def test_profile_that_lost_events_is_refused(tmp_path, monkeypatch):
    def end_early(session):
        path = end_profile(session)
        events = json.loads(path.read_text())
        path.write_text(json.dumps(events[: len(events) // 2]))
        return path

    end_profile = Session.end_profile
    monkeypatch.setattr(Session, "end_profile", end_early)
    with pytest.raises(KvconvError, match=r"holds \d+ of 12 runs .* --gen"):
        profile(write_bundle(tmp_path / "bundle"), 20, gen=3, batch=1, threads=1, prefill_chunk=8)
