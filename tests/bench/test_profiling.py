"""ONNX Runtime's profile, read and split into phases."""

import pytest

from kvconv.bench import profile
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
