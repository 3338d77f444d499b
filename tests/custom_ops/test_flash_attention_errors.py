"""Every refusal of kvconv::FlashAttention: an ONNX Runtime error that names both numbers."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import single_node

Inputs = dict[str, npt.NDArray]
Attributes = dict[str, int | float | str]

# batch 2, new 3, past 4, total 7, capacity 10, heads 4 of 8, kv heads 2, value width 6
ATTRIBUTES: Attributes = {"num_heads": 4, "kv_num_heads": 2}
RING: Attributes = {"cache_mode": "ring", "window_size": 5}


def valid_inputs() -> Inputs:
    def zeros(*shape: int) -> npt.NDArray[np.float32]:
        return np.zeros(shape, dtype=np.float32)

    return {
        "query": zeros(2, 3, 32),
        "key": zeros(2, 3, 16),
        "value": zeros(2, 3, 12),
        "past_key": zeros(2, 2, 10, 8),
        "past_value": zeros(2, 2, 10, 6),
        "attention_mask": np.ones((2, 7), dtype=np.int64),
    }


def reshaped(name: str, *shape: int) -> Callable[[Inputs], None]:
    """A change that gives an input another shape, adding the input if it is absent."""

    def change(inputs: Inputs) -> None:
        dtype = inputs[name].dtype if name in inputs else np.float32
        inputs[name] = np.ones(shape, dtype=dtype)

    return change


def past_length(*values: int, capacity: int = 10) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        inputs["past_sequence_length"] = np.array(values, dtype=np.int32)
        for name in ("past_key", "past_value"):
            inputs[name] = inputs[name][:, :, :1].repeat(capacity, axis=2)

    return change


def both(*changes: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        for one in changes:
            one(inputs)

    return change


def without_mask(inputs: Inputs) -> None:
    del inputs["attention_mask"]


def capacity(slots: int) -> Callable[[Inputs], None]:
    return both(reshaped("past_key", 2, 2, slots, 8), reshaped("past_value", 2, 2, slots, 6))


def rotary(cos: tuple[int, ...], sin: tuple[int, ...]) -> Callable[[Inputs], None]:
    return both(reshaped("cos", *cos), reshaped("sin", *sin))


def packed(size: int, *changes: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        del inputs["key"], inputs["value"]
        both(reshaped("query", 2, 3, size), *changes)(inputs)

    return change


def absent(name: str) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        del inputs[name]

    return change


def scale(name: str) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        inputs[name] = np.zeros((2, 2, 10, 1), dtype=np.uint16)

    return change


RUN_ERRORS: dict[str, tuple[Callable[[Inputs], None], Attributes, list[str]]] = {
    "query rank": (reshaped("query", 6, 32), {}, ["query", "[6, 32]", "rank 2", "rank 3"]),
    "query heads": (reshaped("query", 2, 3, 33), {}, ["query", "33", "num_heads 4"]),
    "query empty": (reshaped("query", 2, 3, 0), {}, ["query", "is 0", "num_heads 4"]),
    "key rank": (reshaped("key", 2, 3, 4, 4), {}, ["key", "rank 4", "rank 3"]),
    "key batch": (reshaped("key", 1, 3, 16), {}, ["key", "is 1", "must be 2", "batch_size"]),
    "key length": (reshaped("key", 2, 5, 16), {}, ["key", "is 5", "must be 3"]),
    "key width": (reshaped("key", 2, 3, 18), {}, ["key", "is 18", "must be 16"]),
    "value batch": (reshaped("value", 3, 3, 12), {}, ["value", "is 3", "must be 2"]),
    "value length": (reshaped("value", 2, 1, 12), {}, ["value", "is 1", "must be 3"]),
    "value width": (reshaped("value", 2, 3, 13), {}, ["value", "13", "kv_num_heads 2"]),
    "key alone": (absent("value"), {}, ["value is absent", "together"]),
    "value alone": (absent("key"), {}, ["key is absent", "together"]),
    "packed size": (packed(61), {}, ["query", "is 61", "4 + kv_num_heads 2", "8", "6"]),
    "packed, query only": (packed(32), {}, ["query", "is 32", "key and value are absent"]),
    "packed, cache of other heads": (
        packed(60, capacity(10), reshaped("past_key", 2, 2, 10, 9)),
        {},
        ["is 60", "head_dim 9"],
    ),
    "packed, heads of nothing": (
        packed(60, reshaped("past_key", 2, 2, 10, 0)),
        {},
        ["past_key", "is 0", "at least 1"],
    ),
    "packed, more heads than elements": (
        packed(60),
        {"num_heads": 2**62},
        ["is 60", str(2**62)],
    ),
    "packed rank": (
        packed(60, reshaped("query", 6, 60)),
        {},
        ["rank 2", "kv_num_heads) * head_dim"],
    ),
    "past_key rank": (reshaped("past_key", 2, 2, 80), {}, ["past_key", "rank 3", "rank 4"]),
    "past_key batch": (reshaped("past_key", 1, 2, 10, 8), {}, ["past_key", "is 1", "be 2"]),
    "past_key heads": (reshaped("past_key", 2, 4, 10, 8), {}, ["past_key", "is 4", "be 2"]),
    "past_key width": (reshaped("past_key", 2, 2, 10, 9), {}, ["past_key", "is 9", "be 8"]),
    "past_value width": (reshaped("past_value", 2, 2, 10, 8), {}, ["past_value", "is 8", "be 6"]),
    "past_value slots": (reshaped("past_value", 2, 2, 9, 6), {}, ["past_value", "is 9", "be 10"]),
    "mask rank": (reshaped("attention_mask", 2, 1, 7), {}, ["attention_mask", "rank 3", "rank 2"]),
    "mask batch": (reshaped("attention_mask", 1, 7), {}, ["attention_mask", "is 1", "be 2"]),
    "mask narrow": (reshaped("attention_mask", 2, 2), {}, ["2 wide", "sequence_length is 3"]),
    "neither mode": (capacity(5), {}, ["5 slots", "7 wide", "sequence_length 3", "exactly 4"]),
    "no lengths": (without_mask, {}, ["attention_mask", "past_sequence_length", "both absent"]),
    "past length negative": (past_length(-1), {}, ["past_sequence_length is -1", "at least 0"]),
    "past length shape": (past_length(4, 4), {}, ["past_sequence_length", "is 2", "must be 1"]),
    "past length, full": (past_length(8), {}, ["capacity is 10", "8", "3", "= 11"]),
    "past length, concat": (past_length(4, capacity=4), {}, ["capacity is 4", "= 7"]),
    "past length, no mask, full": (both(without_mask, past_length(8)), {}, ["is 10", "= 11"]),
    "past length, mask narrow": (past_length(5), {}, ["7 wide", "is 8"]),
    "ring, no length": (lambda inputs: None, RING, ["past_sequence_length is absent", '"ring"']),
    "ring, too many tokens": (
        past_length(4, capacity=6),
        RING,
        ["ring of 6", "window_size is 5", "behind 4 tokens", "at most 2", "sequence_length is 3"],
    ),
    "ring, less than a window": (past_length(4, capacity=3), RING, ["ring of 3", "at most 0"]),
    "ring, endless window": (past_length(8), RING | {"window_size": 2**63 - 1}, ["at most 0"]),
    "ring, mask narrow": (past_length(40), RING, ["7 wide", "is 43"]),
    "cos alone": (reshaped("cos", 1, 3, 4), {}, ["sin is absent"]),
    "sin alone": (reshaped("sin", 1, 3, 4), {}, ["cos is absent"]),
    "cos rank": (rotary((3, 4), (3, 4)), {}, ["cos", "rank 2", "rank 3"]),
    "cos batch": (rotary((3, 3, 4), (1, 3, 4)), {}, ["cos", "is 3", "must be 2"]),
    "cos length": (rotary((1, 7, 4), (1, 7, 4)), {}, ["cos", "is 7", "must be 3"]),
    "cos width": (rotary((1, 3, 8), (1, 3, 8)), {}, ["cos", "is 8", "must be 4"]),
    "sin batch": (rotary((2, 3, 4), (1, 3, 4)), {}, ["sin", "is 1", "must be 2"]),
    "sin width": (rotary((1, 3, 4), (1, 3, 3)), {}, ["sin", "is 3", "must be 4"]),
    "rotary_dim large": (rotary((1, 3, 5), (1, 3, 5)), {"rotary_dim": 10}, ["is 10", "head_dim 8"]),
    "rotary_dim alone": (lambda inputs: None, {"rotary_dim": 8}, ["is 8", "cos and sin"]),
    "bias rank": (reshaped("attention_bias", 1, 1, 1, 1, 1), {}, ["attention_bias", "rank 5"]),
    "bias batch": (reshaped("attention_bias", 3, 1, 1, 1), {}, ["is 3", "must be 1 or 2"]),
    "bias heads": (reshaped("attention_bias", 2, 1, 1), {}, ["is 2", "must be 1 or 4"]),
    "bias queries": (reshaped("attention_bias", 4, 1), {}, ["is 4", "must be 1 or 3"]),
    "bias slots": (reshaped("attention_bias", 10), {}, ["is 10", "must be 1 or 7"]),
    "alibi": (reshaped("alibi_slopes", 2), {}, ["alibi_slopes", "is 2", "must be 4"]),
    "alibi rank": (reshaped("alibi_slopes", 4, 1), {}, ["alibi_slopes", "rank 2", "rank 1"]),
    "sink": (reshaped("head_sink", 8), {}, ["head_sink", "is 8", "must be 4"]),
    "key scale": (scale("past_key_scale"), {}, ["past_key_scale", "float32", "int8 and int4"]),
    "value scale": (scale("past_value_scale"), {}, ["past_value_scale", "leave it out"]),
}


def test_the_valid_inputs_are_accepted() -> None:
    outputs = single_node.run(valid_inputs(), ATTRIBUTES)
    assert outputs["output"].shape == (2, 3, 24)
    inputs = valid_inputs()
    packed(60)(inputs)
    assert single_node.run(inputs, ATTRIBUTES)["output"].shape == (2, 3, 24)


@pytest.mark.parametrize("name", RUN_ERRORS)
def test_inconsistent_inputs_are_refused(name: str) -> None:
    change, attributes, fragments = RUN_ERRORS[name]
    inputs = valid_inputs()
    change(inputs)
    with pytest.raises(Exception, match="kvconv::FlashAttention") as raised:
        single_node.run(inputs, ATTRIBUTES | attributes)
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_refusal_writes_nothing() -> None:
    inputs = valid_inputs() | {"past_sequence_length": np.array([8], dtype=np.int32)}
    del inputs["attention_mask"]
    session = single_node.make_session(
        tuple((name, array.ndim) for name, array in inputs.items()),
        tuple(ATTRIBUTES.items()),
    )
    values = {name: single_node.ort_value(array, "") for name, array in inputs.items()}
    for name in ("past_key", "past_value"):
        values[name] = single_node.ort_value(np.full_like(inputs[name], 7.0), "float32")
    output = single_node.ort_value(np.full((2, 3, 24), 7.0, dtype=np.float32), "float32")
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("output", output)
    binding.bind_ortvalue_output("present_key", values["past_key"])
    binding.bind_ortvalue_output("present_value", values["past_value"])
    with pytest.raises(Exception, match="capacity is 10"):
        session.run_with_iobinding(binding)
    for value in (output, values["past_key"], values["past_value"]):
        assert (value.numpy() == 7.0).all()


ATTRIBUTE_ERRORS: dict[str, tuple[Attributes, list[str]]] = {
    "no heads": ({"num_heads": 0}, ["num_heads is 0", "at least 1"]),
    "no kv heads": ({"kv_num_heads": 0}, ["kv_num_heads is 0", "at least 1"]),
    "heads not a multiple": ({"kv_num_heads": 3}, ["num_heads is 4", "kv_num_heads is 3"]),
    "softcap": ({"softcap": -1.0}, ["softcap is -1", "at least 0"]),
    "scale": ({"scale": float("inf")}, ["scale is inf", "finite"]),
    "window": ({"window_size": -2}, ["window_size is -2", "at least 0"]),
    "rotary_dim odd": ({"rotary_dim": 5}, ["rotary_dim is 5", "even"]),
    "ring without a window": ({"cache_mode": "ring"}, ['cache_mode is "ring"', "window_size is 0"]),
    "cache_mode": ({"cache_mode": "loop"}, ['cache_mode is "loop"', '"auto" or "ring"']),
    "type of an integer": ({"window_size": 2.0}, ["window_size", "must be an integer"]),
    "type of a float": ({"scale": 2}, ["scale", "must be a float"]),
    "type of a string": ({"cache_mode": 1}, ["cache_mode", "must be a string"]),
}


@pytest.mark.parametrize("name", ATTRIBUTE_ERRORS)
def test_bad_attributes_are_refused_when_the_session_is_made(name: str) -> None:
    attributes, fragments = ATTRIBUTE_ERRORS[name]
    ranks = tuple((key, array.ndim) for key, array in valid_inputs().items())
    with pytest.raises(Exception, match="kvconv::FlashAttention") as raised:
        single_node.make_session(ranks, tuple((ATTRIBUTES | attributes).items()))
    for fragment in fragments:
        assert fragment in str(raised.value)


def quantized_inputs(cache_type: str) -> Inputs:
    """The valid inputs over an int8 cache, or an int4 one (uint8): a group of 32 numbers a row."""
    inputs = valid_inputs()
    sizes = (8, 6) if cache_type == "int8" else (20, 16)
    for side, size in zip(("key", "value"), sizes, strict=True):
        inputs[f"past_{side}"] = np.zeros((2, 2, 10, size), dtype=cache_type)
        inputs[f"past_{side}_scale"] = np.zeros((2, 2, 10, 1), dtype=np.uint16)
    return inputs


QUANTIZED_ERRORS: dict[str, tuple[str, Callable[[Inputs], None], list[str]]] = {
    "no key scale": ("int8", absent("past_key_scale"), ["past_key_scale is absent", "int8"]),
    "no value scale": ("uint8", absent("past_value_scale"), ["past_value_scale is", "int4"]),
    "scale rank": (
        "int8",
        reshaped("past_key_scale", 2, 2, 10),
        ["past_key_scale", "rank 3", "rank 4"],
    ),
    "scale batch": ("int8", reshaped("past_key_scale", 1, 2, 10, 1), ["is 1", "must be 2"]),
    "scale heads": ("int8", reshaped("past_value_scale", 2, 1, 10, 1), ["is 1", "must be 2"]),
    "scale slots": ("int8", reshaped("past_key_scale", 2, 2, 9, 1), ["is 9", "must be 10"]),
    "scale groups": (
        "uint8",
        reshaped("past_value_scale", 2, 2, 10, 2),
        ["past_value_scale", "is 2", "must be 1", "32"],
    ),
    "int8 keys": ("int8", reshaped("past_key", 2, 2, 10, 9), ["past_key", "is 9", "be 8"]),
    "int4 keys": ("uint8", reshaped("past_key", 2, 2, 10, 16), ["is 16", "be 20", "head_dim"]),
    "int4 values": ("uint8", reshaped("past_value", 2, 2, 10, 3), ["is 3", "be 16", "value_head"]),
    "int4, packed, no groups": (
        "uint8",
        packed(60, reshaped("past_key", 2, 2, 10, 30)),
        ["past_key", "is 30", "multiple of 20"],
    ),
    "int4, packed, part of a group": (
        "uint8",
        packed(60),
        ["query", "is 60", "head_dim 32", "multiples of 32"],
    ),
}


@pytest.mark.parametrize("name", QUANTIZED_ERRORS)
def test_inconsistent_quantised_caches_are_refused(name: str) -> None:
    cache_type, change, fragments = QUANTIZED_ERRORS[name]
    inputs = quantized_inputs(cache_type)
    assert single_node.run(inputs, ATTRIBUTES, cache_type=cache_type)["output"].shape == (2, 3, 24)
    change(inputs)
    with pytest.raises(Exception, match="kvconv::FlashAttention") as raised:
        single_node.run(inputs, ATTRIBUTES, cache_type=cache_type)
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_quantised_cache_without_outputs_for_its_scales_is_refused() -> None:
    inputs = quantized_inputs("int8")
    ranks = tuple((key, array.ndim) for key, array in inputs.items())
    session = single_node.make_session(ranks, tuple(ATTRIBUTES.items()), cache_type="int8")
    binding = session.io_binding()
    for key, array in inputs.items():
        kind = single_node.input_type(key, "float32", "int8")
        binding.bind_ortvalue_input(key, single_node.ort_value(array, kind))
    for output in single_node.OUTPUTS:
        binding.bind_output(output)
    with pytest.raises(Exception, match="output 3 is absent"):
        session.run_with_iobinding(binding)
