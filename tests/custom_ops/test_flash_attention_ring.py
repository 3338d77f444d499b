"""Rings of kvconv::FlashAttention give what a cache of all tokens gives, wrap after wrap."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

import single_node
from tolerances import assert_close

BATCH, KV_HEADS, WIDTH = 2, 2, 16
FEATURES = ("plain", "left padding", "softcap", "sinks", "alibi", "bias", "rotary", "not causal")
Array = npt.NDArray[np.float32]


def make_feeds(feature: str, total: int, heads: int) -> dict[str, npt.NDArray]:
    """Inputs of `total` tokens, without a cache; a run takes its own part of them."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    feeds: dict[str, npt.NDArray] = {
        "query": normal(BATCH, total, heads * WIDTH),
        "key": normal(BATCH, total, KV_HEADS * WIDTH),
        "value": normal(BATCH, total, KV_HEADS * WIDTH),
        "attention_mask": np.ones((BATCH, total), np.int64),
    }
    match feature:
        case "left padding":
            feeds["attention_mask"][0, : total // 3] = 0
        case "sinks":
            feeds["head_sink"] = normal(heads)
        case "alibi":
            feeds["alibi_slopes"] = 2.0 ** -np.arange(1, heads + 1, dtype=np.float32)
        case "bias":
            feeds["attention_bias"] = normal(1, heads, total, total)
        case "rotary":
            feeds["cos"], feeds["sin"] = normal(1, total, WIDTH // 2), normal(1, total, WIDTH // 2)
    return feeds


def part(name: str, array: npt.NDArray, past: int, end: int) -> npt.NDArray:
    if name == "attention_bias":
        return array[:, :, past:end, :end]
    if name == "attention_mask":
        return array[:, :end]
    return array if name in ("head_sink", "alibi_slopes") else array[:, past:end]


def run_pieces(
    feeds: dict[str, npt.NDArray],
    sizes: Sequence[int],
    attributes: dict[str, int | float | str],
    *,
    slots: int,
    cache: str = "float32",
    in_place: bool,
) -> Array:
    """Run pieces one behind the other over a cache of so many slots; return all outputs."""
    empty = np.full((BATCH, KV_HEADS, slots, WIDTH), np.nan, np.float32)
    stored = single_node.to_bfloat16(empty) if cache == "bfloat16" else empty.astype(cache)
    values = {name: single_node.ort_value(stored, cache) for name in ("past_key", "past_value")}
    ranks = {name: array.ndim for name, array in feeds.items()}
    ranks |= {"past_key": 4, "past_value": 4, "past_sequence_length": 1}
    session = single_node.make_session(
        tuple(ranks.items()), tuple(sorted(attributes.items())), "float32", cache
    )
    outputs, past = [], 0
    for size in sizes:
        binding = session.io_binding()
        fed = {name: part(name, array, past, past + size) for name, array in feeds.items()}
        fed["past_sequence_length"] = np.array([past], np.int32)
        owned = {name: single_node.ort_value(array, "float32") for name, array in fed.items()}
        for name, value in (owned | values).items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("output")
        for name in values:
            present = name.replace("past", "present")
            if in_place:
                binding.bind_ortvalue_output(present, values[name])
            else:
                binding.bind_output(present)
        session.run_with_iobinding(binding)
        output, *presents = binding.get_outputs()
        values = dict(zip(values, presents, strict=True))
        outputs.append(output.numpy())
        past += size
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    ("window", "most_new", "heads"), [(5, 1, 2), (70, 40, 4), (130, 257, 2), (64, 64, 6)]
)
def test_ring_gives_what_a_whole_cache_gives(
    window: int, most_new: int, heads: int, feature: str, in_place: bool
) -> None:
    slots = window + most_new - 1
    sizes = [*range(1, 5), most_new, 1, most_new, 2, most_new // 2, most_new, 1, most_new, 1]
    sizes = [min(max(size, 1), most_new) for size in sizes]
    sizes += [1] * max(0, 3 * slots - sum(sizes)) if slots < 100 else [most_new] * 4
    assert sum(sizes) >= 3 * slots
    feeds = make_feeds(feature, sum(sizes), heads)
    attributes = {"num_heads": heads, "kv_num_heads": KV_HEADS, "window_size": window}
    attributes |= {"softcap": 1.5} if feature == "softcap" else {}
    attributes |= {"causal": 0} if feature == "not causal" else {}
    whole = run_pieces(feeds, sizes, attributes, slots=sum(sizes), in_place=in_place)
    ring = attributes | {"cache_mode": "ring"}
    found = run_pieces(feeds, sizes, ring, slots=slots, in_place=in_place)
    assert_close(found, whole.astype(np.float64), "float32", "output")


@pytest.mark.parametrize("cache", ["float16", "bfloat16"])
def test_ring_of_16_bits_gives_what_a_whole_cache_gives(cache: str) -> None:
    feeds = make_feeds("rotary", 400, 4)
    attributes = {"num_heads": 4, "kv_num_heads": KV_HEADS, "window_size": 20}
    sizes = [30, *[1] * 60, 30, 7, *[30] * 9, 3]
    whole = run_pieces(feeds, sizes, attributes, slots=400, cache=cache, in_place=True)
    attributes |= {"cache_mode": "ring"}
    found = run_pieces(feeds, sizes, attributes, slots=49, cache=cache, in_place=True)
    assert_close(found, whole.astype(np.float64), "float32", "output")


def test_ring_that_has_not_wrapped_takes_a_run_of_any_length() -> None:
    feeds = make_feeds("plain", 60, 2)
    attributes = {"num_heads": 2, "kv_num_heads": KV_HEADS, "window_size": 50}
    whole = run_pieces(feeds, [60], attributes, slots=60, in_place=True)
    attributes |= {"cache_mode": "ring"}
    found = run_pieces(feeds, [60], attributes, slots=60, in_place=True)
    assert np.array_equal(found, whole)
