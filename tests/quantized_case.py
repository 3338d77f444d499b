"""Runs over int8 and int4 caches, and what the oracles say of them.

What is stored is compared with the oracle of quantized_rows.py, a code apart where a number lies
between two; the output with that of reference.py over what the op itself stored, so that attention
is held to its own tolerance and not to that of codes.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

import quantized_rows
import reference
import single_node
from flash_case import Case, expected_output, make_inputs
from tolerances import assert_close

Arrays = dict[str, npt.NDArray[Any]]
SIDES = ("key", "value")


def kinds(cache: str) -> dict[str, str]:
    """The kind of rows of each side of a cache, as quantized_rows names them."""
    return {"key": "int5" if cache == "int4" else cache, "value": cache}


def widths(case: Case) -> dict[str, int]:
    return {"key": case.width, "value": case.value_width or case.width}


def storage(cache: str) -> str:
    return "uint8" if cache == "int4" else "int8"


def quantized_inputs(case: Case, cache: str) -> Arrays:
    """The case's inputs with its past rounded and packed; what nobody may read is noise."""
    inputs = make_inputs(case)
    rng = np.random.default_rng(case.seed + 1)
    for side, kind in kinds(cache).items():
        rows = quantized_rows.transform(inputs[f"past_{side}"])
        stored, scales = quantized_rows.quantize(rows, kind)
        unused = np.s_[:, :, case.past :]
        stored[unused] = rng.integers(0, 127, stored[unused].shape)
        scales[unused] = quantized_rows.NAN_BITS
        inputs[f"past_{side}"], inputs[f"past_{side}_scale"] = stored, scales
    return inputs


def stored_rows(case: Case, cache: str, outputs: Arrays, side: str) -> npt.NDArray[np.float32]:
    """The numbers of a side's present, as they were rotated."""
    return quantized_rows.dequantize(
        outputs[f"present_{side}"],
        outputs[f"present_{side}_scale"],
        kinds(cache)[side],
        widths(case)[side],
    )


def new_rows(case: Case, inputs: Arrays, side: str) -> npt.NDArray[np.float64]:
    """The new tokens' keys or values as they are to be stored, before they are rounded."""
    rows = reference.split_heads(inputs[side], case.kv_heads)
    if side == "key" and case.rotary:
        interleaved = case.rotary == "interleaved"
        rows = reference.rotate(rows, inputs["cos"], inputs["sin"], interleaved=interleaved)
    return quantized_rows.transform(rows)


def attended(case: Case, cache: str, inputs: Arrays, outputs: Arrays) -> npt.NDArray[np.float64]:
    """The oracle's output over what the op stored, rotated back."""
    caches = tuple(
        quantized_rows.transform(stored_rows(case, cache, outputs, side)) for side in SIDES
    )
    return expected_output(replace(case, cache="float32"), inputs, caches)


def check_outputs(case: Case, cache: str, inputs: Arrays, outputs: Arrays, tolerance: str) -> None:
    """Compare what is stored, the past included, and the output."""
    for side, kind in kinds(cache).items():
        name = f"present_{side}"
        past = np.s_[:, :, : case.past]
        for tensor in (side, f"{side}_scale"):
            before, after = inputs[f"past_{tensor}"], outputs[f"present_{tensor}"]
            assert after.shape[2] == (case.total if case.mode == "concat" else case.capacity)
            assert after[past].tobytes() == before[past].tobytes(), f"{tensor}: the past changed"
        rows = new_rows(case, inputs, side)
        wanted = quantized_rows.dequantize(
            *quantized_rows.quantize(rows, kind), kind, widths(case)[side]
        )
        actual = stored_rows(case, cache, outputs, side)[:, :, case.past : case.total]
        bits = outputs[f"{name}_scale"][:, :, case.past : case.total]
        scales = np.abs(single_node.from_bfloat16(bits)).repeat(32, axis=-1)
        distance = np.abs(actual - wanted)
        assert (distance <= 1.1 * scales[..., : distance.shape[-1]]).all(), name
        assert (distance > 0).mean() < 0.01, f"{name}: not only numbers between two codes differ"
    assert_close(outputs["output"], attended(case, cache, inputs, outputs), tolerance, "output")
