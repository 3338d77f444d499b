"""The Triton kernels of kvconv::FlashAttention in Triton's interpreter, against the oracles.

Only with TRITON_INTERPRET=1, which has to be there before Triton is imported: `make test-kernels`.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

import flash_case
from flash_case import Case
from quantized_case import check_outputs, quantized_inputs
from tolerances import assert_close

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set (make test-kernels)", allow_module_level=True)
pytest.importorskip("triton")

import triton_interpreter

TILE = triton_interpreter.TILE
pytestmark = pytest.mark.kernels
BASE = Case(width=32, mode="past_sequence_length", padding="left", batch=2, poison=True)
DECODE = replace(BASE, new=1, past=3 * TILE + 5)
PREFILL = replace(BASE, new=TILE + 3, past=TILE + 1)
FEATURES = {
    "no padding": {"padding": "", "poison": False},
    "holes": {"padding": "holes"},
    "nothing attended": {"padding": "none attended"},
    "multi-head": {"heads": 3, "kv_heads": 3},
    "one key head": {"heads": 5, "kv_heads": 1},
    "wider values": {"value_width": 64},
    "narrower values": {"value_width": 16},
    "rotary": {"rotary": "half"},
    "interleaved": {"rotary": "interleaved", "rotary_batch": 2},
    "part is rotated": {"rotary": "half", "rotary_dim": 8},
    "window": {"window": 5},
    "window of a tile": {"window": TILE},
    "window of two": {"window": 2 * TILE + 1},
    "softcap and scale": {"softcap": 1.5, "scale": 0.7},
    "sinks": {"sink": True},
    "alibi": {"alibi": True},
    "not causal": {"causal": False},
    "all at once": {
        "rotary": "half", "window": 21, "softcap": 2.0, "sink": True, "alibi": True,
        "bias": (1, 1, 1, 2), "padding": "holes",
    },
}  # fmt: skip


def check_floats(case):
    inputs = flash_case.make_inputs(case)
    caches = flash_case.expected_caches(case, inputs)
    expected = flash_case.expected_output(case, inputs, caches)
    outputs = triton_interpreter.run(case, inputs)
    tolerance = next(
        (t for t in ("bfloat16", "float16") if t in (case.activation, case.cache)), "float32"
    )
    found = outputs["output"]
    assert_close(found, expected.reshape(found.shape), tolerance, "output")
    for side, cache in zip(("key", "value"), caches, strict=True):
        used = np.s_[:, :, : case.total]
        kept, wanted = (
            flash_case.from_cache(x[used], case.cache) for x in (outputs[f"present_{side}"], cache)
        )
        assert_close(kept, wanted, tolerance, side)


def check_quantized(case, cache):
    inputs = quantized_inputs(case, cache)
    outputs = triton_interpreter.run(case, inputs)
    # Codes and scales are multiplied in float16 first where activations are.
    check_outputs(case, cache, inputs, outputs, case.activation)


@pytest.mark.parametrize("base", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(base, feature):
    check_floats(replace(base, **FEATURES[feature]))


@pytest.mark.parametrize("cache", ["int8", "int4"])
@pytest.mark.parametrize("base", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("feature", ["wider values", "all at once"])
def test_features_over_quantised_caches(base, feature, cache):
    check_quantized(replace(base, **FEATURES[feature], poison=False), cache)


@pytest.mark.parametrize("new", [1, 2, 7, TILE - 1, TILE, TILE + 1])
@pytest.mark.parametrize("past", [0, 1, TILE - 1, TILE, TILE + 1, 4 * TILE - 1])
def test_sizes(new, past):
    check_floats(replace(BASE, padding="", poison=False, batch=1, new=new, past=past))


@pytest.mark.parametrize("cache", ["int8", "int4"])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, TILE), (TILE, 0), (TILE + 1, TILE - 1)])
def test_sizes_over_quantised_caches(new, past, cache):
    check_quantized(replace(BASE, padding="", poison=False, new=new, past=past), cache)


WIDE = replace(BASE, batch=1, poison=False, padding="", rotary="half", kv_heads=1, heads=2)


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
def test_widths(width, new):
    check_floats(replace(WIDE, width=width, new=new))


@pytest.mark.parametrize("cache", ["int8", "int4"])
@pytest.mark.parametrize(
    "width", [80, 64, *(pytest.param(w, marks=pytest.mark.slow) for w in (96, 128, 192, 256))]
)
def test_widths_over_quantised_caches(width, cache):
    for new in (1, 5):
        check_quantized(replace(WIDE, width=width, new=new), cache)


@pytest.mark.parametrize("activation", ["float32", "float16"])
@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("base", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_types(base, activation, cache):
    case = replace(base, activation=activation, poison=False)
    if cache in ("int8", "int4"):
        check_quantized(case, cache)
    else:
        check_floats(replace(case, cache=cache))


@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (1, 4, 5, 8), (5, 1), (1, 1, 5, 8)])
def test_bias_is_broadcast(shape):
    new, past = (shape[-2], 3) if shape[-2] > 1 else (6, 10)
    check_floats(replace(BASE, new=new, past=past, bias=shape))


@pytest.mark.parametrize(
    ("cache", "sizes"),
    [
        ("float32", (1,) * 60),
        ("float32", (20, 1, 1, 9, 1, 17, 1)),
        ("int8", (7, 5, 25, 3, 1, 1)),
        ("int4", (20, 25, 1)),
    ],
)
def test_ring_gives_what_a_whole_cache_gives(cache, sizes):
    """Crosses a window of 16 in rings of 16 + 24 rows several times."""
    window, capacity, total = 16, 40, sum(sizes)
    case = replace(BASE, batch=1, padding="", poison=False, window=window, new=total, past=0)
    case = replace(case, rotary="half", spare=0)
    make = flash_case.make_inputs if cache == "float32" else None
    inputs = make(case) if make else quantized_inputs(case, cache)
    shared = {n: a for n, a in inputs.items() if n.startswith(("past_key", "past_value"))}
    ring = {name: array[:, :, :capacity].copy() for name, array in shared.items()}
    past = 0
    for new in sizes:
        part = replace(case, new=new, past=past)
        tokens = slice(past, past + new)
        given = {n: inputs[n][:, tokens] for n in ("query", "key", "value", "cos", "sin")}
        given["past_sequence_length"] = np.array([past], np.int32)
        whole = triton_interpreter.run(part, given | shared)
        turned = triton_interpreter.run(part, given | ring, is_ring=True)
        assert_close(turned["output"], whole["output"], "float32", f"tokens {tokens}")
        for caches, outputs in ((shared, whole), (ring, turned)):
            caches |= {name: outputs[name.replace("past", "present")] for name in caches}
        past += new


def test_several_rows_each_have_their_own_tables_and_masks():
    case = replace(BASE, batch=3, rotary="interleaved", rotary_batch=3, bias=(3, 4, 1, 2))
    check_floats(replace(case, new=1, past=11))
    check_floats(replace(case, new=9, past=2))
