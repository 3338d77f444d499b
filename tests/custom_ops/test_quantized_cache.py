"""int8 and int4 caches of kvconv::FlashAttention through ONNX Runtime.

quantized_case.py says what is compared with what.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quantized_rows
import single_node
from flash_case import Case, make_inputs, pack
from quantized_case import (
    SIDES,
    Arrays,
    check_outputs,
    kinds,
    quantized_inputs,
    storage,
    widths,
)
from tolerances import assert_close

TYPES = ("int8", "int4")
TILE = 128  # keys of a tile where rows are few; a half where they are many


def run(case: Case, cache: str, inputs: Arrays) -> Arrays:
    return single_node.run(
        pack(inputs) if case.packed else inputs,
        case.node_attributes,
        activation=case.activation,
        cache_type=storage(cache),
        threads=case.threads,
    )


def check(case: Case, cache: str) -> Arrays:
    """Run the case; compare what is stored and the output. Returns the outputs."""
    inputs = quantized_inputs(case, cache)
    outputs = run(case, cache, inputs)
    tolerance = "16-bit queries" if case.activation == "float32" else case.activation
    check_outputs(case, cache, inputs, outputs, tolerance)
    return outputs


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(
    ("new", "past"),
    [(1, 0), (1, TILE - 2), (1, TILE - 1), (1, TILE), (2, 3 * TILE), (7, 1), (63, 0), (64, 1),
     (65, 70)],
)  # fmt: skip
def test_sizes(cache: str, heads: tuple[int, int], new: int, past: int) -> None:
    check(Case(new=new, past=past, heads=heads[0], kv_heads=heads[1], width=32), cache)


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize(
    ("width", "value_width"),
    [(1, 1), (7, 33), (16, 5), (31, 32), (64, 64), (80, 80), (96, 48), (128, 64), (256, 256),
     (65, 129)],
)  # fmt: skip
@pytest.mark.parametrize(("new", "past"), [(1, 70), (20, 45)])
def test_head_widths(cache: str, width: int, value_width: int, new: int, past: int) -> None:
    check(Case(new=new, past=past, width=width, value_width=value_width), cache)


FEATURES: dict[str, Case] = {
    "softcap": Case(softcap=1.5),
    "window": Case(window=40),
    "not causal": Case(causal=False),
    "sinks": Case(sink=True),
    "alibi": Case(alibi=True),
    "bias": Case(bias=(2, 2, 2, 2)),
    "rotary": Case(rotary="half"),
    "rotary interleaved, partial": Case(rotary="interleaved", rotary_dim=6),
    "left padding": Case(padding="left"),
    "holes": Case(padding="holes"),
    "nothing attended": Case(padding="none attended"),
    "all of them": Case(
        softcap=2.0, window=40, sink=True, alibi=True, bias=(2, 2, 2, 2), rotary="half",
        rotary_batch=3, padding="holes", value_width=24,
    ),
}  # fmt: skip


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize(("new", "past"), [(1, 90), (9, 70)])
@pytest.mark.parametrize("name", FEATURES)
def test_features(cache: str, name: str, new: int, past: int) -> None:
    check(replace(FEATURES[name], new=new, past=past, batch=3, width=48, seed=1), cache)


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize("mode", ["shared", "past_sequence_length", "concat"])
@pytest.mark.parametrize("activation", ["float32", "float16"])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 130), (20, 45)])
def test_modes(cache: str, mode: Any, activation: str, new: int, past: int) -> None:
    case = Case(new=new, past=past, batch=2, activation=activation, mode=mode, width=64,
                rotary="half", padding="left")  # fmt: skip
    separate = check(case, cache)
    packed = check(replace(case, packed=True), cache)
    for name, array in separate.items():
        used = np.s_[:] if name == "output" else np.s_[:, :, : case.total]
        assert np.array_equal(packed[name][used], array[used]), name


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize("case", [Case(batch=0), Case(new=0, past=4), Case(new=0, past=0)])
def test_empty_sizes(cache: str, case: Case) -> None:
    outputs = run(case, cache, quantized_inputs(case, cache))
    assert outputs["output"].size == 0


def special_rows(width: int) -> dict[str, npt.NDArray[np.float32]]:
    """Rows [width] that rounding must get right."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal(width).astype(np.float32)
    channel = normal.copy()
    channel[3] *= 50
    one = np.zeros(width, np.float32)
    one[5] = 1.0
    signs = np.where(np.arange(width) % 2, -1.0, 1.0).astype(np.float32)
    whole = rng.integers(-9, 10, width).astype(np.float32)
    with_nan, with_infinity = whole.copy(), whole.copy()
    with_nan[2], with_infinity[-1] = np.nan, np.inf
    return {
        "zeros": np.zeros(width, np.float32),
        "constant": np.full(width, -3.0, np.float32),
        "a channel 50 times the rest": channel,
        "one": one,
        "signs": signs,
        "whole numbers": whole,
        "tiny": np.full(width, 1e-40, np.float32),
        "small": whole * np.float32(2.0**-120),
        "huge": np.full(width, 3e36, np.float32),
        "NaN": with_nan,
        "infinity": with_infinity,
    }


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize("width", [16, 64, 80])
def test_special_rows_are_stored_as_the_oracle_says(cache: str, width: int) -> None:
    """Bit for bit: these widths are rotated without rounding, whole numbers in whole ones."""
    rows = special_rows(width)
    del rows["a channel 50 times the rest"]  # no whole numbers
    case = Case(new=len(rows), past=0, heads=1, kv_heads=1, width=width)
    inputs = quantized_inputs(case, cache)
    new = np.stack(list(rows.values()))[None]
    outputs = run(case, cache, inputs | {"key": new, "value": new})
    for side, kind in kinds(cache).items():
        with np.errstate(invalid="ignore"):
            rotated = quantized_rows.transform(new[:, None])
        stored, scales = quantized_rows.quantize(rotated, kind)
        for i, name in enumerate(rows):
            actual = outputs[f"present_{side}"][0, 0, i]
            assert np.array_equal(actual, stored[0, 0, i]), f"{side} of {name}"
            actual = outputs[f"present_{side}_scale"][0, 0, i]
            assert np.array_equal(actual, scales[0, 0, i]), f"scale of {side} of {name}"


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize(("new", "past"), [(1, 40), (1, 700), (20, 40)])
@pytest.mark.parametrize("side", SIDES)
def test_nan_is_read_back_where_it_is_seen_and_only_there(
    cache: str, side: str, new: int, past: int
) -> None:
    case = Case(new=new, past=past, width=64, mode="shared")
    inputs = quantized_inputs(case, cache)
    inputs[f"past_{side}_scale"][:, :, 7, 0] = quantized_rows.NAN_BITS
    seen = run(case, cache, inputs)["output"]
    assert np.isnan(seen).all()
    inputs["attention_mask"][:, 7] = 0
    outputs = run(case, cache, inputs)
    assert np.isfinite(outputs["output"]).all()
    inputs[f"past_{side}_scale"][:, :, 7, 0] = 0
    wanted = run(case, cache, inputs)["output"].astype(np.float64)
    assert_close(outputs["output"], wanted, "float32", "output")


@pytest.mark.parametrize("cache", TYPES)
def test_nan_in_a_later_token_does_not_reach_earlier_queries(cache: str) -> None:
    case = Case(new=9, past=3, width=32)
    inputs = quantized_inputs(case, cache)
    inputs["key"][0, 5, :4] = np.nan
    inputs["value"][0, 5, :4] = np.inf
    output = run(case, cache, inputs)["output"]
    assert np.isfinite(output[:, :5]).all()
    assert np.isnan(output[:, 5:]).any()


@pytest.mark.parametrize(
    ("cache", "spike", "allowed"),
    [("int8", 1, 0.01), ("int8", 50, 0.025), ("int4", 1, 0.13), ("int4", 50, 0.2)],
)
@pytest.mark.parametrize(("new", "past"), [(1, 500), (40, 460)])
def test_output_is_as_near_to_float_attention_as_codes_are(
    cache: str, spike: float, allowed: float, new: int, past: int
) -> None:
    """Also where a channel of the keys is 50 times the rest, which the rotation spreads."""
    case = Case(new=new, past=past, width=64, heads=6)
    inputs = make_inputs(case)
    for name in ("past_key", "key"):
        inputs[name][..., 3::64] *= spike
    inputs["query"][..., 3::64] /= spike
    wanted = single_node.run(inputs, case.node_attributes)["output"]
    rounded = dict(inputs)
    for side, kind in kinds(cache).items():
        stored = quantized_rows.quantize(quantized_rows.transform(inputs[f"past_{side}"]), kind)
        rounded[f"past_{side}"], rounded[f"past_{side}_scale"] = stored
    actual = run(case, cache, rounded)["output"]
    error = np.sqrt(np.mean((actual - wanted) ** 2) / np.mean(wanted**2))
    assert allowed / 4 < error < allowed, error


@dataclass
class Cache:
    """A shared buffer of `capacity` slots: past and present are one memory."""

    case: Case
    kind: str
    capacity: int
    length: int = 0
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side, kind in kinds(self.kind).items():
            lead = (self.case.batch, self.case.kv_heads, self.capacity)
            codes = np.full((*lead, quantized_rows.row_size(kind, widths(self.case)[side])), 77)
            scales = np.full((*lead, -(-widths(self.case)[side] // 32)), quantized_rows.NAN_BITS)
            stored = codes.astype(storage(self.kind))
            self.values[side] = single_node.ort_value(stored, storage(self.kind))
            self.values[f"{side}_scale"] = single_node.ort_value(
                scales.astype(np.uint16), "bfloat16"
            )

    def contents(self) -> Arrays:
        return {name: single_node.output_array(value) for name, value in self.values.items()}

    def run(self, inputs: Arrays) -> npt.NDArray[np.float32]:
        new = inputs["query"].shape[1]
        feeds = inputs | {"attention_mask": np.ones((self.case.batch, self.length + new), np.int64)}
        outputs = single_node.run_in_place(
            feeds, self.values, self.case.node_attributes, storage(self.kind)
        )
        self.length += new
        return outputs[0].numpy()


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("width", [64, 80])
def test_at_once_in_pieces_and_token_by_token_agree(cache_type: str, width: int) -> None:
    case = Case(batch=2, new=70, past=0, rotary="half", width=width)
    inputs = make_inputs(case)
    fed = {name: inputs[name] for name in ("query", "key", "value", "cos", "sin")}

    def feed(sizes: list[int]) -> tuple[npt.NDArray[np.float32], Arrays]:
        cache = Cache(case, cache_type, capacity=80)
        outputs = []
        for size in sizes:
            piece = slice(cache.length, cache.length + size)
            outputs.append(cache.run({name: array[:, piece] for name, array in fed.items()}))
        return np.concatenate(outputs, axis=1), cache.contents()

    whole, stored = feed([70])
    for name, array in stored.items():
        unused = array[:, :, 70:]
        assert (unused == (quantized_rows.NAN_BITS if "scale" in name else 77)).all(), name
    for sizes in ([1, 30, 7, 32], [1] * 70):
        pieces, other = feed(sizes)
        assert_close(pieces, whole.astype(np.float64), "16-bit queries", "output")
        for name, array in stored.items():
            assert array.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("cache", TYPES)
def test_a_row_of_a_batch_is_what_it_is_alone(cache: str) -> None:
    case = Case(batch=3, new=5, past=200, width=64)
    inputs = quantized_inputs(case, cache)
    together = run(case, cache, inputs)
    for b in range(case.batch):
        alone = run(replace(case, batch=1), cache, {k: v[b : b + 1] for k, v in inputs.items()})
        for name, array in alone.items():
            used = np.s_[:] if name == "output" else np.s_[:, :, : case.total]
            if name == "output":
                wanted = together[name][b : b + 1].astype(np.float64)
                assert_close(array, wanted, "16-bit queries", name)
            else:
                assert np.array_equal(array[used], together[name][b : b + 1][used]), name


@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize(("new", "past"), [(1, 1500), (150, 40)])
def test_result_does_not_depend_on_threads(cache: str, new: int, past: int) -> None:
    case = Case(new=new, past=past, width=32)
    one, two = (check(replace(case, threads=n), cache) for n in (1, 2))
    for name, array in one.items():
        used = np.s_[:] if name == "output" else np.s_[:, :, : case.total]
        assert np.array_equal(array[used], two[name][used]), name
