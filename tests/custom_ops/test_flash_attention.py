"""kvconv::FlashAttention through ONNX Runtime against the float64 oracle of tests/reference.py.

The kernel's tile is 64 keys (128 where query rows are few) and its blocks are up to 96 query rows,
in strips of 12, 24 or 48, so sizes around those count.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
from onnxruntime import OrtValue

import single_node
from flash_case import (
    MODES,
    Case,
    Mode,
    expected_caches,
    expected_output,
    from_cache,
    make_inputs,
    pack,
    to_cache,
)
from tolerances import assert_close

TILE = 64


def check(case: Case) -> dict[str, npt.NDArray]:
    """Run the case and compare the cache's used slots and the output; return the outputs.

    The output is compared over the cache that the op itself wrote: a key that lies between two
    float16 values may be rounded to either, which is no error of the attention.
    """
    inputs = make_inputs(case)
    actual = single_node.run(
        pack(inputs) if case.packed else inputs,
        case.node_attributes,
        activation=case.activation,
        cache_type=case.cache,
        threads=case.threads,
    )
    names = ("present_key", "present_value")
    for name, wanted in zip(names, expected_caches(case, inputs), strict=True):
        assert actual[name].shape == wanted.shape, name
        used = [x[:, :, : case.total] for x in (actual[name], wanted)]
        assert_close(*(from_cache(x, case.cache) for x in used), case.cache, name)
        past = [x[:, :, : case.past].tobytes() for x in used]
        assert past[0] == past[1], f"{name}: the past is not the same bit for bit"
    output = expected_output(case, inputs, tuple(actual[name] for name in names))
    assert_close(actual["output"], output, case.activation, "output")
    return actual


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("new", [1, 2, 7, TILE - 1, TILE, TILE + 1])
@pytest.mark.parametrize("past", [0, 1, TILE - 1, TILE, 90])
def test_sizes(mode: Mode, heads: tuple[int, int], new: int, past: int) -> None:
    check(Case(new=new, past=past, heads=heads[0], kv_heads=heads[1], mode=mode, width=8))


@pytest.mark.parametrize("width", [1, 2, 7, 15, 16, 17, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("value_width", [0, 1, 5, 33, 128])
def test_head_widths(width: int, value_width: int) -> None:
    check(Case(new=9, past=70, width=width, value_width=value_width))


FEATURES: dict[str, Case] = {
    "scale": Case(scale=0.7),
    "softcap": Case(softcap=1.5),
    "softcap large": Case(softcap=30.0, scale=2.0),
    "window 1": Case(window=1),
    "window": Case(window=4),
    "window of a tile": Case(window=TILE),
    "not causal": Case(causal=False),
    "not causal, window": Case(causal=False, window=3),
    "sinks": Case(sink=True),
    "alibi": Case(alibi=True),
    "alibi, not causal": Case(alibi=True, causal=False),
    "bias": Case(bias=(2, 2, 2, 2)),
    "bias per batch": Case(bias=(2, 1, 2, 2)),
    "bias per head": Case(bias=(1, 2, 1, 2)),
    "bias per query": Case(bias=(1, 1, 2, 1)),
    "bias per slot": Case(bias=(2,)),
    "bias of rank 3": Case(bias=(2, 2, 2)),
    "bias scalar": Case(bias=()),
    "rotary half": Case(rotary="half"),
    "rotary interleaved": Case(rotary="interleaved"),
    "rotary half, partial": Case(rotary="half", rotary_dim=6),
    "rotary interleaved, partial": Case(rotary="interleaved", rotary_dim=6),
    "rotary per sequence": Case(rotary="half", rotary_batch=3, batch=3),
    "left padding": Case(padding="left"),
    "right padding": Case(padding="right"),
    "holes": Case(padding="holes"),
    "nothing attended": Case(padding="none attended"),
    "nothing attended, sinks": Case(padding="none attended", sink=True),
    "all of them": Case(
        softcap=2.0, window=40, sink=True, alibi=True, bias=(2, 2, 2, 2), rotary="half",
        rotary_batch=3, batch=3, padding="holes", value_width=24,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 90), (3, 62), (9, 70), (70, 0)])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, new: int, past: int, mode: Mode) -> None:
    feature = FEATURES[name]
    check(replace(feature, new=new, past=past, mode=mode, batch=3, seed=1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("activation", ["float32", "float16"])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 90), (9, 70), (TILE + 1, 0)])
def test_packed_is_the_same_as_separate(
    mode: Mode, heads: tuple[int, int], activation: str, new: int, past: int
) -> None:
    case = Case(new=new, past=past, heads=heads[0], kv_heads=heads[1], batch=2, mode=mode,
                activation=activation, value_width=24, rotary="half", padding="left")  # fmt: skip
    separate = check(case)
    packed = check(replace(case, packed=True))
    for name in separate:
        used = slice(None) if name == "output" else np.s_[:, :, : case.total]
        assert np.array_equal(packed[name][used], separate[name][used]), name


@pytest.mark.parametrize("case", [Case(batch=0, packed=True), Case(new=0, past=4, packed=True)])
@pytest.mark.parametrize("mode", MODES)
def test_packed_empty_sizes(case: Case, mode: Mode) -> None:
    check(replace(case, mode=mode))


SWITCHES = {
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "window": {"window": 4},
    "causal": {"causal": False},
    "sinks": {"sink": True},
    "alibi": {"alibi": True},
    "bias": {"bias": (2, 2, 2, 2)},
    "rotary": {"rotary": "half"},
    "padding": {"padding": "left"},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_feature_changes_the_output(name: str) -> None:
    """Guards the other tests: a feature that both sides forgot would pass them."""
    plain = Case(new=9, past=30)
    outputs = [check(case)["output"] for case in (plain, replace(plain, **SWITCHES[name]))]
    assert np.abs(outputs[0] - outputs[1]).max() > 0.05


@pytest.mark.parametrize("activation", ["float32", "float16"])
@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("new", "past"), [(1, 130), (20, 45)])
def test_types(activation: str, cache: str, mode: Mode, new: int, past: int) -> None:
    check(
        Case(
            new=new, past=past, batch=2, activation=activation, cache=cache, mode=mode, width=24,
            value_width=40, rotary="half", bias=(1, 2, 2, 2), padding="left", sink=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("padding", ["", "left", "holes"])
def test_long_past_is_split_over_keys(threads: int, window: int, padding: str) -> None:
    case = Case(new=1, past=2100, batch=2, window=window, padding=padding, sink=True)
    check(replace(case, threads=threads, width=32))


def test_result_does_not_depend_on_threads() -> None:
    for case in (Case(new=1, past=1500, width=32), Case(new=150, past=40, width=32)):
        one, two = (check(replace(case, threads=n))["output"] for n in (1, 2))
        assert np.array_equal(one, two)


def test_one_session_runs_on_several_threads_at_once() -> None:
    cases = [Case(new=1 + 40 * (seed % 2), past=700, width=32, seed=seed) for seed in range(16)]
    alone = [check(case)["output"] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: check(case)["output"], cases))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("padding", ["", "left", "right", "holes"])
@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("past", [40, 1300])
def test_nan_in_unseen_slots_does_not_leak(padding: str, cache: str, past: int) -> None:
    case = Case(new=6, past=past, batch=2, padding=padding, cache=cache, poison=True)
    assert not np.isnan(check(case)["output"]).any()


def test_nan_in_a_later_token_does_not_reach_earlier_queries() -> None:
    case = Case(new=9, past=3)
    inputs = make_inputs(case)
    inputs["key"][0, 5, :4] = np.nan
    inputs["value"][0, 5, :4] = np.inf
    actual = single_node.run(inputs, case.node_attributes)["output"]
    output = expected_output(case, inputs, expected_caches(case, inputs))
    assert_close(actual, output, "float32", "output")
    assert np.isfinite(actual[:, :5]).all()
    assert np.isnan(actual[:, 5:]).any()


@pytest.mark.parametrize("past", [20, 700])
def test_bias_of_minus_infinity_is_a_mask(past: int) -> None:
    """A bias that hides what a mask hides gives the same; a query that sees nothing gives 0."""
    case = Case(new=6, past=past, batch=2, padding="holes")
    inputs = make_inputs(case)
    masked = single_node.run(inputs, case.node_attributes)["output"]
    hidden = inputs["attention_mask"][:, None, None, :] == 0
    ones = np.ones_like(inputs["attention_mask"])
    bias = np.where(hidden, -np.inf, 0).astype(np.float32)
    biased = inputs | {"attention_mask": ones, "attention_bias": bias}
    assert np.array_equal(single_node.run(biased, case.node_attributes)["output"], masked)
    biased["attention_bias"] = np.full_like(bias, -np.inf)
    assert (single_node.run(biased, case.node_attributes)["output"] == 0).all()


@pytest.mark.parametrize("case", [Case(batch=0), Case(new=0, past=4), Case(new=0, past=0)])
@pytest.mark.parametrize("mode", MODES)
def test_empty_sizes(case: Case, mode: Mode) -> None:
    check(replace(case, mode=mode))


@dataclass
class Cache:
    """A shared buffer driven by hand: past and present bound to one OrtValue per tensor."""

    case: Case
    capacity: int
    length: int = 0
    values: dict[str, OrtValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.case.batch, self.case.kv_heads, self.capacity, self.case.width)
        for name in ("key", "value"):
            fill = to_cache(np.full(shape, np.nan, dtype=np.float32), self.case.cache)
            self.values[name] = single_node.ort_value(fill, self.case.cache)

    def array(self, name: str) -> npt.NDArray:
        return from_cache(single_node.output_array(self.values[name]), self.case.cache)

    def run(self, inputs: dict[str, npt.NDArray]) -> npt.NDArray:
        """Feed the new tokens; the past and present tensors never leave their place."""
        new = inputs["query"].shape[1]
        mask = np.ones((self.case.batch, self.length + new), dtype=np.int64)
        feeds = {"attention_mask": mask, **inputs}
        outputs = single_node.run_in_place(
            feeds, self.values, self.case.node_attributes, self.case.cache
        )
        for value, output in zip(self.values.values(), outputs[1:], strict=True):
            assert output.data_ptr() == value.data_ptr()
        self.length += new
        return outputs[0].numpy()


@pytest.mark.parametrize("cache_type", ["float32", "float16", "bfloat16"])
def test_shared_buffer_is_written_in_place_and_nowhere_else(cache_type: str) -> None:
    case = Case(batch=2, new=5, past=0, mode="shared", cache=cache_type)
    cache = Cache(case, capacity=12)
    inputs = make_inputs(case)
    fed = {name: inputs[name] for name in ("query", "key", "value")}
    cache.run(fed)
    before = {name: cache.array(name).copy() for name in cache.values}
    cache.run({name: array[:, :2] for name, array in fed.items()})
    for name, array in before.items():
        after = cache.array(name)
        assert np.array_equal(after[:, :, :5], array[:, :, :5]), "the past was changed"
        assert not np.isnan(after[:, :, 5:7]).any(), "the new tokens are not there"
        assert np.isnan(after[:, :, 7:]).all(), "a slot beyond the new tokens was written"


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("cache_type", ["float32", "float16"])
def test_prefill_at_once_in_pieces_and_token_by_token_agree(window: int, cache_type: str) -> None:
    case = Case(batch=2, new=70, past=0, window=window, rotary="half", cache=cache_type, width=32)
    inputs = make_inputs(case)
    fed = {name: inputs[name] for name in ("query", "key", "value", "cos", "sin")}

    def feed(sizes: list[int]) -> tuple[npt.NDArray, Cache]:
        cache = Cache(case, capacity=80)
        outputs = []
        for size in sizes:
            piece = slice(cache.length, cache.length + size)
            outputs.append(cache.run({name: array[:, piece] for name, array in fed.items()}))
        return np.concatenate(outputs, axis=1), cache

    whole, whole_cache = feed([70])
    caches = tuple(single_node.output_array(value) for value in whole_cache.values.values())
    assert_close(whole, expected_output(case, inputs, caches), "float32", "output")
    for sizes in ([1, 30, 7, 32], [1] * 70):
        pieces, cache = feed(sizes)
        assert_close(pieces, whole.astype(np.float64), "float32", "output")
        for name in cache.values:
            same = np.array_equal(cache.array(name), whole_cache.array(name), equal_nan=True)
            assert same, f"cache {name}"
