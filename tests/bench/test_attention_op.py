"""The attention op alone: what is measured, not how fast it is."""

import dataclasses
import sys

import pytest

from kvconv import memory
from kvconv.bench import attention_op
from kvconv.bench.attention_op import Case, Heads, cases, measure_attention
from kvconv.errors import KvconvError, MissingDependencyError

HEADS = Heads(num_heads=4, kv_num_heads=2, head_dim=16)


@pytest.fixture(autouse=True)
def small_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roofs and chains that take no time."""
    monkeypatch.setattr(attention_op, "MemoryRoof", lambda threads: _MemoryRoof())
    monkeypatch.setattr(attention_op, "OnnxRuntimeMatMul", lambda threads: _MatMul(4e9))
    monkeypatch.setattr(attention_op, "TorchMatMul", lambda threads: _MatMul(5e9))
    monkeypatch.setattr(attention_op, "_MAX_NODES", 2)
    monkeypatch.setattr(attention_op, "_SETTLE_S", 0.0)


class _MemoryRoof:
    def read(self) -> float:
        return 2e9

    def copy(self) -> float:
        return 3e9


@dataclasses.dataclass
class _MatMul:
    rate: float

    def run(self) -> float:
        return self.rate


@pytest.mark.parametrize("variant", ["plain", "softcap", "head_sink"])
@pytest.mark.parametrize(
    ("what", "roofs"),
    [
        ("decode", {"read": 2e9, "copy": 3e9}),
        ("prefill", {"sgemm onnxruntime": 4e9, "sgemm torch": 5e9}),
    ],
)
def test_point_holds_both_ops_and_the_roofs(what, variant, roofs) -> None:
    case = Case(what, 24, HEADS, variant, batch=2)
    (point,) = measure_attention([case], threads=1, repeats=2)
    assert point.case == case
    assert point.roofs == roofs
    work = case.cache_bytes if what == "decode" else case.flops
    assert point.rate == pytest.approx(work / point.seconds)
    assert point.speedup == pytest.approx(point.gqa_seconds / point.seconds)
    first = next(iter(roofs))
    assert point.percent_of_roofs[first] == pytest.approx(100 * point.rate / roofs[first])


@pytest.mark.parametrize("cache", ["int8", "int4"])
@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_quantised_cache_is_measured_beside_a_float_one(what, cache) -> None:
    (point,) = measure_attention([Case(what, 40, HEADS, cache=cache)], threads=1, repeats=2)
    assert point.float_seconds > 0
    assert point.float_seconds != point.seconds


def test_quantised_cache_of_other_keys_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = attention_op._quantized
    monkeypatch.setattr(
        attention_op, "_quantized", lambda case, caches: quantize(case, [[-x for x in caches[0]]])
    )
    monkeypatch.setattr(attention_op, "_MAX_NODES", 1)
    with pytest.raises(KvconvError, match="differ by"):
        next(measure_attention([Case("decode", 24, HEADS, cache="int8")], threads=1, repeats=1))


def test_bytes_of_quantised_caches() -> None:
    heads = Heads(num_heads=4, kv_num_heads=2, head_dim=48)
    assert Case("decode", 10, heads, cache="int8").cache_bytes == 10 * 2 * 2 * (48 + 2 * 2)
    assert Case("decode", 10, heads, cache="int4").cache_bytes == 10 * 2 * (2 * 36 + 4 * 2)


def test_work_of_a_case() -> None:
    decode = Case("decode", 10, HEADS, batch=3)
    assert decode.cache_bytes == 3 * 10 * (2 * 2 * 16) * 4
    assert decode.flops == 4 * 3 * 4 * 16 * 10
    assert Case("prefill", 10, HEADS).flops == 4 * 4 * 16 * 55


def test_variants_differ() -> None:
    """Guards the comparison: a feature lost on both sides would go unnoticed."""
    outputs = []
    for variant in ("plain", "softcap", "head_sink"):
        case = Case("prefill", 24, HEADS, variant)
        tensors = attention_op._Tensors(case)
        for values in ("query", "key"):
            tensors._arrays[values] *= 8.0
        outputs.append(attention_op._Contender(case, tensors, "FlashAttention", 1).run().copy())
    assert abs(outputs[0] - outputs[1]).max() > 0.01
    assert abs(outputs[0] - outputs[2]).max() > 0.01


def test_ops_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    build = attention_op._graph

    def wrong(case, op, available):
        changed = dataclasses.replace(case, variant="plain") if op == "FlashAttention" else case
        return build(changed, op, [name for name in available if name != "head_sink"]
                     if op == "FlashAttention" else available)  # fmt: skip

    monkeypatch.setattr(attention_op, "_graph", wrong)
    with pytest.raises(KvconvError, match="differ by"):
        next(measure_attention([Case("prefill", 24, HEADS, "head_sink")], threads=1, repeats=1))


def test_without_onnx_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match=r"kvconv\[export\]"):
        measure_attention([Case("decode", 8, HEADS)], threads=1, repeats=1)


def test_case_larger_than_the_memory_is_refused_before_the_first_is_measured(monkeypatch) -> None:
    chosen = [Case("prefill", context, HEADS, "head_sink") for context in (8, 1000)]
    scores = 4 * HEADS.num_heads * 1000 * 1000
    assert chosen[1].num_bytes > scores > chosen[0].num_bytes
    monkeypatch.setattr(memory, "physical_memory_bytes", lambda: scores)
    with pytest.raises(MemoryError, match=r"prefill of 1000 tokens .* smaller --depths"):
        measure_attention(chosen, threads=1, repeats=1)
    monkeypatch.setattr(memory, "physical_memory_bytes", lambda: chosen[1].num_bytes)
    measure_attention(chosen, threads=1, repeats=1)


def test_cases_are_every_combination() -> None:
    chosen = cases(decode=(8,), prefill=(8, 16), shapes=[HEADS], variants=("plain", "softcap"))
    assert len(chosen) == 6
    assert [case.what for case in chosen].count("decode") == 2
