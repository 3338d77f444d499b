"""Runs cases of the Triton kernels in the interpreter and prints what came of each, as JSON.

    cases.py [BEGINNING OF NAMES]

A program of its own, because the interpreter must be chosen before triton is imported and then
holds for the whole process. {case: what differs, or ""}.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import interpreted
import numpy as np
import numpy.typing as npt
from interpreted import TILE

import quantized_rows
import reference
import single_node
from flash_case import Case, expected_caches, expected_output, make_inputs
from tolerances import assert_close

BASE = Case(width=16, mode="past_sequence_length", padding="left", batch=2, poison=True, past=20)
STEP = dataclasses.replace(BASE, new=1, past=37)
SIZES = (1, 2, 7, TILE - 1, TILE, TILE + 1)
FEATURES: dict[str, dict[str, Any]] = {
    "no mask": {"padding": "", "poison": False},
    "holes": {"padding": "holes"},
    "right padding": {"padding": "right"},
    "nothing attended": {"padding": "none attended"},
    "multi-head": {"heads": 3, "kv_heads": 3},
    "one key head": {"heads": 4, "kv_heads": 1},
    "widths differ": {"value_width": 32},
    "width 80": {"width": 80, "value_width": 48},
    "width 96": {"width": 96},
    "width 192": {"width": 192, "value_width": 128},
    "rotary": {"rotary": "half"},
    "interleaved, partial": {"rotary": "interleaved", "rotary_dim": 8, "rotary_batch": 2},
    "half, partial": {"rotary": "half", "rotary_dim": 4, "rotary_batch": 2},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "window of a tile": {"window": TILE + 3},
    "softcap and scale": {"softcap": 1.5, "scale": 0.7},
    "sinks": {"sink": True},
    "sinks, nothing attended": {"sink": True, "padding": "none attended"},
    "alibi": {"alibi": True},
    "bias": {"bias": (2, 4, 5, 8)},
    "bias of heads": {"bias": (1, 4, 1, 8)},
    "bias of slots": {"bias": (8,)},
    "not causal": {"causal": False},
    "float16": {"activation": "float16", "cache": "float16"},
    "float16 over float32": {"activation": "float16"},
    "float32 over float16": {"cache": "float16"},
    "float32 over bfloat16": {"cache": "bfloat16"},
    "all of it": {
        "rotary": "half", "window": 21, "softcap": 2.0, "sink": True, "alibi": True,
        "bias": (1, 4, 5, 8), "padding": "holes", "width": 48,
    },
}  # fmt: skip
HOLES = ((0,), (TILE - 1,), (TILE,), (2 * TILE, 4 * TILE + 3), (0, 3 * TILE - 1))
QUANTIZED: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"activation": "float16"},
    "width 80": {"width": 80, "value_width": 48},
    "rotary, window": {"rotary": "half", "window": 9, "width": 32},
    "holes, sinks": {"padding": "holes", "sink": True, "width": 64},
}


def float_case(case: Case, **options: Any) -> None:
    """Compare a run over a float cache with the oracle."""
    inputs = make_inputs(case)
    for name in ("key", "value") if case.cache == "bfloat16" else ():
        # The interpreter drops the bits that a GPU rounds, so there are none.
        inputs[name] = single_node.from_bfloat16(single_node.to_bfloat16(inputs[name]))
    caches = expected_caches(case, inputs)
    expected = expected_output(case, inputs, caches)
    found = interpreted.run(case, inputs, **options)
    kind = "float16" if "float16" in (case.activation, case.cache) else "float32"
    assert_close(found["output"].reshape(expected.shape), expected, kind, "output")
    for side, cache in zip(("key", "value"), caches, strict=True):
        name = f"present_{side}"
        stored = [x[:, :, : case.total] for x in (found[name], cache)]
        if case.cache == "bfloat16":
            stored = [single_node.from_bfloat16(x) for x in stored]
        assert_close(*stored, case.cache, name)
        unused = np.s_[:, :, case.total :]
        assert found[name][unused].tobytes() == inputs[f"past_{side}"][unused].tobytes(), (
            f"{name}: rows behind the new tokens were written"
        )


def quantized_case(case: Case, bits: int) -> None:
    """Compare what is stored with the oracle's codes, the output with what is stored."""
    kinds = {"key": "int5" if bits == 4 else "int8", "value": f"int{bits}"}
    widths = {"key": case.width, "value": case.value_width or case.width}
    inputs = make_inputs(case)
    for side, kind in kinds.items():
        past = inputs[f"past_{side}"]
        codes, scales = quantized_rows.quantize(quantized_rows.transform(past), kind)
        scales[:, :, case.past :] = quantized_rows.NAN_BITS
        inputs[f"past_{side}"], inputs[f"past_{side}_scale"] = codes, scales
    found = interpreted.run(case, inputs, cache_bits=bits)

    caches = []
    for side, kind in kinds.items():
        new = reference.split_heads(inputs[side], case.kv_heads)
        if side == "key" and case.rotary:
            new = reference.rotate(new, inputs["cos"], inputs["sin"], interleaved=False)
        wanted = quantized_rows.dequantize(
            *quantized_rows.quantize(quantized_rows.transform(new), kind), kind, widths[side]
        )
        bits_of_scales = found[f"present_{side}_scale"]
        numbers = quantized_rows.dequantize(
            found[f"present_{side}"], bits_of_scales, kind, widths[side]
        )
        steps = np.abs(single_node.from_bfloat16(bits_of_scales)).repeat(32, axis=-1)
        appended = np.s_[:, :, case.past : case.total]
        distance = np.abs(numbers[appended] - wanted)
        allowed = 1.1 * steps[appended][..., : widths[side]]
        assert (distance <= allowed).all(), f"{side}: more than a code away"
        differ = float((distance > 0).mean())
        assert differ < 0.01, f"{side}: {differ:.1%} of the codes differ"
        past_rows = np.s_[:, :, : case.past]
        assert (
            found[f"present_{side}"][past_rows].tobytes()
            == inputs[f"past_{side}"][past_rows].tobytes()
        ), f"{side}: the past changed"
        caches.append(quantized_rows.transform(numbers))
    expected = expected_output(dataclasses.replace(case, cache="float32"), inputs, tuple(caches))
    assert_close(found["output"].reshape(expected.shape), expected, case.activation, "output")


def ring_case(case: Case, capacity: int) -> None:
    """Compare a run over a ring with the oracle over a cache that keeps every token."""
    inputs = make_inputs(case)
    caches = expected_caches(case, inputs)
    expected = expected_output(case, inputs, caches)
    ring = dict(inputs)
    for side in ("key", "value"):
        past = inputs[f"past_{side}"]
        rows = np.full_like(past[:, :, :capacity], np.nan)
        for slot in range(max(0, case.past - capacity), case.past):
            rows[:, :, slot % capacity] = past[:, :, slot]
        ring[f"past_{side}"] = rows
    found = interpreted.run(case, ring, ring=True)
    assert_close(found["output"].reshape(expected.shape), expected, "float32", "output")
    for side, cache in zip(("key", "value"), caches, strict=True):
        for slot in range(max(0, case.total - capacity), case.total):
            row: npt.NDArray[Any] = found[f"present_{side}"][:, :, slot % capacity]
            assert_close(row, cache[:, :, slot], "float32", f"present_{side} of slot {slot}")


def quantized_ring_case(case: Case, capacity: int, bits: int) -> None:
    """A ring holds the same codes as a cache that keeps every token, and gives the same output."""
    inputs = make_inputs(case)
    for side in ("key", "value"):
        kind = {4: {"key": "int5", "value": "int4"}, 8: dict.fromkeys(("key", "value"), "int8")}
        rows = quantized_rows.transform(inputs[f"past_{side}"])
        codes, scales = quantized_rows.quantize(rows, kind[bits][side])
        inputs[f"past_{side}"], inputs[f"past_{side}_scale"] = codes, scales
    ring = dict(inputs)
    names = [f"{side}{part}" for side in ("key", "value") for part in ("", "_scale")]
    for name in names:
        past = inputs[f"past_{name}"]
        rows = np.full_like(past[:, :, :capacity], quantized_rows.NAN_BITS & 0x7F)
        if name.endswith("scale"):
            rows[:] = quantized_rows.NAN_BITS
        for slot in range(max(0, case.past - capacity), case.past):
            rows[:, :, slot % capacity] = past[:, :, slot]
        ring[f"past_{name}"] = rows
    wanted = interpreted.run(case, inputs, cache_bits=bits)
    found = interpreted.run(case, ring, cache_bits=bits, ring=True)
    assert_close(found["output"], wanted["output"].astype(np.float64), "float32", "output")
    for name in names:
        kept, whole = found[f"present_{name}"], wanted[f"present_{name}"]
        for slot in range(max(0, case.total - capacity), case.total):
            assert (kept[:, :, slot % capacity] == whole[:, :, slot]).all(), f"{name} of {slot}"


def hole_case(case: Case, holes: tuple[int, ...]) -> None:
    """Nothing but the given slots is masked, whatever tiles they lie in; NaN lies there."""
    inputs = make_inputs(case)
    mask = np.ones((case.batch, case.capacity), dtype=np.int64)
    mask[0, list(holes)] = 0  # the other row of the batch has none
    inputs["attention_mask"] = mask
    for side in ("key", "value"):
        inputs[f"past_{side}"][0, :, [hole for hole in holes if hole < case.past]] = np.nan
    expected = expected_output(case, inputs, expected_caches(case, inputs))
    found = interpreted.run(case, inputs)
    assert_close(found["output"].reshape(expected.shape), expected, "float32", "output")


def narrow_mask_case(case: Case, width: int) -> None:
    """Slots behind the mask's columns are not attended, nor is the bias read there."""
    inputs = make_inputs(case)
    inputs["attention_mask"] = np.ones((case.batch, case.capacity), dtype=np.int64)
    inputs["attention_mask"][:, width:] = 0
    expected = expected_output(case, inputs, expected_caches(case, inputs))
    inputs["attention_mask"] = np.ones((case.batch, width), dtype=np.int64)
    found = interpreted.run(case, inputs)
    assert_close(found["output"].reshape(expected.shape), expected, "float32", "output")


def overflow_case() -> None:
    """Tokens that do not fit are dropped, and nothing beyond the cache is touched."""
    case = dataclasses.replace(BASE, padding="", poison=False, past=0, new=5, spare=0, batch=1)
    inputs = make_inputs(case)
    past = dataclasses.replace(case, past=3)
    for side in ("key", "value"):
        before = inputs[f"past_{side}"]
        found = interpreted.run(past, inputs)[f"present_{side}"]
        new = reference.split_heads(inputs[side], case.kv_heads)
        assert found[:, :, :3].tobytes() == before[:, :, :3].tobytes()
        assert_close(found[:, :, 3:], new[:, :, :2], "float32", side)


def cases() -> dict[str, Any]:
    """Every case by name, as what runs it."""
    made: dict[str, Any] = {}
    for new in SIZES:
        for past in (0, TILE - 1, TILE, 2 * TILE + 3):
            case = dataclasses.replace(BASE, new=new, past=past, batch=1)
            made[f"sizes: {new} after {past}"] = lambda case=case: float_case(case)
    for kind, base in (("prefill", BASE), ("decode", STEP)):
        for name, changes in FEATURES.items():
            case = dataclasses.replace(base, **changes)
            made[f"{kind}: {name}"] = lambda case=case: float_case(case)
        packed = dataclasses.replace(base, rotary="half")
        made[f"{kind}: packed"] = lambda case=packed: float_case(case, packed=True)
        for bits in (8, 4):
            for name, changes in QUANTIZED.items():
                case = dataclasses.replace(base, poison=False, **changes)
                made[f"{kind}: int{bits}, {name}"] = lambda case=case, bits=bits: quantized_case(
                    case, bits
                )
        for past in (5, 30, 61):
            case = dataclasses.replace(base, window=8, past=past, poison=False)
            made[f"{kind}: ring after {past}"] = lambda case=case: ring_case(case, 19)
        for bits in (8, 4):
            case = dataclasses.replace(base, window=8, past=61, width=32, padding="", poison=False)
            made[f"{kind}: int{bits}, ring"] = lambda case=case, bits=bits: quantized_ring_case(
                case, 19, bits
            )
        case = dataclasses.replace(base, past=4 * TILE + 3, padding="", poison=False)
        for holes in HOLES:
            made[f"{kind}: holes at {holes}"] = lambda case=case, holes=holes: hole_case(
                case, holes
            )
            windowed = dataclasses.replace(case, window=2 * TILE + 5)
            made[f"{kind}: window, holes at {holes}"] = lambda case=windowed, holes=holes: (
                hole_case(case, holes)
            )
        far = dataclasses.replace(base, batch=1, past=1100, padding="", poison=False)
        made[f"{kind}: hole beyond a scan"] = lambda case=far: hole_case(case, (1030,))
        narrow = dataclasses.replace(case, bias=(2, 4, 5, 8))
        made[f"{kind}: mask narrower than the past"] = lambda case=narrow: narrow_mask_case(
            case, 2 * TILE + 1
        )
    for splits in (1, 7):
        made[f"decode: {splits} splits"] = lambda splits=splits: float_case(
            dataclasses.replace(STEP, spare=70), num_splits=splits
        )
    made["sizes: tokens beyond the cache"] = overflow_case
    return made


def main() -> None:
    """Run the cases whose names begin with the argument."""
    beginning = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = {name: run for name, run in cases().items() if name.startswith(beginning)}
    results = {}
    for name, run in chosen.items():
        try:
            run()
            results[name] = ""
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
