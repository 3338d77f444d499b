"""What a plan counts, against figures worked out by hand."""

import dataclasses

import pytest

from kvconv.errors import NotEnoughMemoryError
from kvconv.manifest import CacheLayer, RunSizes
from kvconv.plan import (
    DecoderSizes,
    check_run_fits,
    check_weights_fit,
    kv_cache_bytes,
    largest,
    plan,
)

# A Llama of 70 billion weights: 80 layers, 64 query heads, 8 KV heads of 128.
LLAMA_70B = (CacheLayer(8, 128, 128, "float16"),) * 80
# Gemma 3 270M: 18 layers of one KV head of 256; every sixth sees all tokens, others 512.
GEMMA_3 = (
    *(CacheLayer(1, 256, 256, "float32", window_size=512),) * 15,
    *(CacheLayer(1, 256, 256, "float32"),) * 3,
)
# Falcon 7B: 32 layers, 71 query heads that share one KV head of 64.
FALCON_7B = (CacheLayer(1, 64, 64, "float16"),) * 32


def sizes(layers=LLAMA_70B, **changes):
    given = {
        "cache_layers": layers,
        "attention": "flash",
        "weight_bytes": 1000,
        "vocab_size": 10,
        "run": RunSizes(num_attention_heads=64, activation_width=36864, packed_bytes=0),
    }
    return DecoderSizes(**given | changes)


@pytest.mark.parametrize(
    ("layers", "batch_size", "context", "expected"),
    [
        # 2 (key, value) x 1 row x 80 layers x 4096 tokens x 8 heads x 128 numbers x 2 bytes
        # = 2 x 80 = 160; x 4096 = 655,360; x 1024 = 671,088,640; x 2 = 1,342,177,280
        (LLAMA_70B, 1, 4096, 1_342_177_280),
        # With 64 KV heads (MHA) eight times as much.
        ((CacheLayer(64, 128, 128, "float16"),) * 80, 1, 4096, 10_737_418_240),
        # 18 layers x 2048 tokens x 1 head x (256 + 256) numbers x 4 bytes
        # = 18 x 2048 = 36,864; x 2048 bytes = 75,497,472
        (GEMMA_3, 1, 2048, 75_497_472),
        # 4 rows x 32 layers x 2048 tokens x 1 head x (64 + 64) numbers x 2 bytes
        # = 4 x 32 x 2048 = 262,144; x 256 bytes = 67,108,864
        (FALCON_7B, 4, 2048, 67_108_864),
        # DeepSeek-V3: 61 layers, one head whose key is 512 + 64 wide and whose value 512
        # = 61 x 100 x 1088 x 2 = 13,273,600
        ((CacheLayer(1, 576, 512, "float16"),) * 61, 1, 100, 13_273_600),
    ],
    ids=["llama-70b", "llama-70b-mha", "gemma-3", "falcon-7b-mqa", "deepseek-v3"],
)
def test_cache_bytes_equal_those_worked_out_by_hand(layers, batch_size, context, expected):
    planned = plan(sizes(layers), batch_size=batch_size, context=context)
    assert planned.cache_bytes == expected
    assert kv_cache_bytes(layers, batch_size=batch_size, max_sequence_length=context) == expected


def test_cache_parts_tell_windowed_layers_from_those_that_see_all_tokens():
    windowed, full = plan(sizes(GEMMA_3), batch_size=1, context=2048).cache
    # 15 x 2048 slots x 2048 bytes a slot; 3 x 2048 x 2048
    assert (windowed.num_layers, windowed.window_size, windowed.data_bytes) == (15, 512, 62_914_560)
    assert (full.num_layers, full.window_size, full.data_bytes) == (3, None, 12_582_912)


def test_rings_hold_their_own_capacity_or_a_shorter_context():
    ring = CacheLayer(1, 256, 256, "float32", window_size=512, cache_mode="ring", capacity=1023)
    layers = (*(ring,) * 15, *GEMMA_3[15:])
    # 15 x 1023 slots x 2048 bytes = 31,426,560; 15 x 100 x 2048 = 3,072,000
    for context, slots, ring_bytes, full_bytes in (
        (2048, 1023, 31_426_560, 12_582_912),
        (100, 100, 3_072_000, 614_400),
    ):
        rings, full = plan(sizes(layers), batch_size=1, context=context).cache
        assert (rings.slots, rings.data_bytes) == (slots, ring_bytes)
        assert (full.slots, full.data_bytes) == (context, full_bytes)


@pytest.mark.parametrize(
    ("dtype", "data_bytes", "scale_bytes"),
    [
        ("bfloat16", 1_342_177_280, 0),
        # 80 x 4096 x 8 heads x 2 = 5,242,880 heads of 128 bytes, 4 scales of 2 bytes each
        ("int8", 671_088_640, 41_943_040),
        # Half as many of 4 x 20 bytes and of 4 x 16, as many scales
        ("int4", 377_487_360, 41_943_040),
    ],
)
def test_quantised_caches_count_their_scales(dtype, data_bytes, scale_bytes):
    layers = (dataclasses.replace(LLAMA_70B[0], dtype=dtype),) * 80
    (part,) = plan(sizes(layers), batch_size=1, context=4096).cache
    assert (part.data_bytes, part.scale_bytes) == (data_bytes, scale_bytes)


def test_odd_heads_are_rounded_up_to_whole_groups():
    layers = (CacheLayer(1, 33, 33, "int4"),)
    # 2 groups: 40 bytes of keys, 32 of values, 2 scales of 2 bytes for each.
    assert kv_cache_bytes(layers, batch_size=1, max_sequence_length=1) == 40 + 32 + 4 + 4


def test_total_is_the_sum_of_all_parts():
    planned = plan(sizes(run=RunSizes(64, 36864, packed_bytes=70)), batch_size=2, context=1000)
    # 2 x 512 tokens x 36864 numbers x 5 x 4 bytes
    assert planned.workspace == 754_974_720
    assert planned.logits == 2 * 10 * 4
    assert planned.total == (
        1000 + 70 + planned.cache_bytes + planned.logits + 754_974_720 + planned.program
    )
    assert planned.run_bytes == planned.total - 1000 - 70 - planned.program


def test_prefill_chunk_bounds_the_workspace():
    whole = plan(sizes(), batch_size=1, context=512).workspace
    assert plan(sizes(), batch_size=1, context=8192).workspace == whole
    assert plan(sizes(), batch_size=1, context=8192, prefill_chunk=256).workspace == whole // 2
    assert plan(sizes(), batch_size=1, context=64).workspace == whole // 8


def test_flavours_without_tiles_count_scores_and_growing_ones_their_presents():
    flash = plan(sizes(), batch_size=1, context=4096)
    standard = plan(sizes(attention="standard"), batch_size=1, context=4096)
    # Scores and softmax: 2 x 64 heads x 512 tokens x 4096 x 4 bytes
    assert standard.workspace - flash.workspace == 1_073_741_824
    assert (flash.growth, standard.growth) == (0, standard.cache_bytes)
    # gqa runs whole prompts where there are several rows: 2 x 64 x (2 x 4096) x 4096 x 4
    gqa = plan(sizes(attention="gqa"), batch_size=2, context=4096)
    activations = 2 * 4096 * 36864 * 5 * 4
    assert gqa.workspace - activations == 17_179_869_184


@pytest.mark.parametrize(
    ("threshold", "limit", "expected"),
    [(0, None, 0), (1, None, 1), (1000, None, 1000), (1000, 900, 900), (5, 900, 5), (4, 4, 4)],
)
def test_largest_finds_the_last_that_fits(threshold, limit, expected):
    assert largest(lambda n: n <= threshold, limit) == expected


def test_what_fits_exactly_is_not_refused_and_one_byte_less_is():
    planned = plan(sizes(), batch_size=3, context=20)
    check_run_fits(planned, planned.run_bytes)
    check_run_fits(planned, None)
    with pytest.raises(NotEnoughMemoryError, match="3 x 20 tokens.*--batch-size") as caught:
        check_run_fits(planned, planned.run_bytes - 1)
    assert caught.value.needed_bytes == planned.run_bytes
    assert caught.value.free_bytes == planned.run_bytes - 1
    # 3 rows x 20 tokens x 80 layers x 8 heads x 256 numbers x 2 bytes = 19,660,800
    assert "19,660,800 bytes" in str(caught.value)


def test_weights_are_refused_with_what_is_packed_beside_them():
    packed = sizes(run=RunSizes(64, 1, packed_bytes=70))
    check_weights_fit(packed, 1070)
    check_weights_fit(packed, None)
    with pytest.raises(NotEnoughMemoryError) as caught:
        check_weights_fit(packed, 1069)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (1070, 1069)
