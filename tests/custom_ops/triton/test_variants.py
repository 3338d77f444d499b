"""Which kernels there are for an attention, and that what there is none for is refused."""

import pytest

from kvconv.custom_ops.triton.variants import (
    DEFAULT_GPUS,
    GPUS,
    HEAD_DIMS,
    Attention,
    Feature,
    Kind,
    Variant,
    choose_tile,
    list_variants,
    parse_gpus,
)
from kvconv.errors import ExportError

LLAMA = Attention(10, 10, 64, 64, 3, 64, Feature.ROTARY | Feature.MASK | Feature.CAUSAL)
INT8 = LLAMA._replace(cache_type=3)


def arguments_of(kind, attention):
    return Variant(kind, attention, GPUS["sm_80"]).arguments


def test_append_takes_keys_values_and_the_tables_of_rotary():
    assert arguments_of(Kind.APPEND, LLAMA) == (
        "key", "value", "present_key", "present_value", "cos", "sin", "past_sequence_length",
        "key_token_stride", "value_token_stride", "sequence_length", "capacity", "kv_num_heads",
        "rotary_batch_stride",
    )  # fmt: skip


def test_prefill_takes_everything_that_any_feature_needs():
    every = LLAMA._replace(features=Feature(1023), cache_type=2)
    assert arguments_of(Kind.PREFILL, every) == (
        "query", "present_key", "present_value", "present_key_scale", "present_value_scale",
        "attention_mask", "cos", "sin", "attention_bias", "alibi_slopes", "head_sink",
        "past_sequence_length", "output", "query_token_stride", "sequence_length", "capacity",
        "mask_width", "num_heads", "kv_num_heads", "rotary_batch_stride", "bias_stride_batch",
        "bias_stride_head", "bias_stride_query", "bias_stride_slot", "window_size", "scale",
        "softcap",
    )  # fmt: skip


def test_decode_leaves_sinks_and_the_output_to_combine():
    sink = LLAMA._replace(features=Feature.SINK)
    decode, combine = arguments_of(Kind.DECODE, sink), arguments_of(Kind.COMBINE, sink)
    assert "head_sink" not in decode
    assert "output" not in decode
    assert combine == (
        "head_sink", "output", "partial_output", "partial_maximum", "partial_sum", "num_heads",
        "num_splits",
    )  # fmt: skip
    assert set(combine[2:5]) < set(decode)


def test_quantised_cache_brings_scales_as_bfloat16_and_codes_as_integers():
    signature = Variant(Kind.PREFILL, INT8, GPUS["sm_80"]).signature
    assert signature["present_key_scale"] == "*bf16"
    assert signature["present_key"] == "*i8"
    assert signature["query"] == "*fp16"
    int4 = Variant(Kind.DECODE, INT8._replace(cache_type=2), GPUS["sm_80"])
    assert int4.signature["present_value"] == "*u8"
    assert int4.constants["CACHE_BITS"] == 4


def test_equal_attentions_share_kernels_and_every_kind_comes_for_every_gpu_and_as_ptx():
    variants = list_variants([LLAMA, INT8, LLAMA], ["sm_90", "sm_80"])
    assert len(variants) == len(set(variants)) == len(Kind) * 2 * 3
    assert [variant.kind for variant in variants] == sorted(variant.kind for variant in variants)
    ptx = [variant for variant in variants if variant.is_ptx]
    assert {variant.gpu.compute_capability for variant in ptx} == {80}
    assert len(ptx) == len(Kind) * 2


def test_order_does_not_depend_on_the_order_of_nodes_and_gpus():
    there = list_variants([LLAMA, INT8], ["sm_80", "sm_120"])
    assert there == list_variants([INT8, LLAMA], ["sm_120", "sm_80"])


@pytest.mark.parametrize("gpu", GPUS)
def test_tiles_are_powers_of_two_and_hold_a_whole_group(gpu):
    for width in HEAD_DIMS:
        for kind in Kind:
            for types in ((10, 10), (1, 1), (10, 2)):
                attention = Attention(*types, width, width, 20, 0, Feature(0))
                tile = choose_tile(kind, attention, GPUS[gpu])
                assert all(size & (size - 1) == 0 for size in tile[:3])
                if kind is Kind.DECODE:
                    assert tile.m == 32


def test_gpus_come_once_in_order_and_all_by_default():
    assert parse_gpus(()) == DEFAULT_GPUS
    assert parse_gpus((" sm_90", "sm_80", "sm_90")) == ("sm_80", "sm_90")


@pytest.mark.parametrize("gpu", ["sm_75", "90", "", "sm_90a"])
def test_unknown_gpu_is_refused_with_those_that_are_known(gpu):
    with pytest.raises(ExportError, match=f"'{gpu}' is no GPU .*sm_80,sm_86,sm_89,sm_90"):
        parse_gpus(("sm_80", gpu))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 112}, "layer has head_dim 112; .* take 16, 32, 64, 80, 96, 128, 192, 256"),
        ({"value_head_dim": 8}, "layer has value_head_dim 8"),
        ({"group": 71}, "layer has 71 query heads for each key/value head; .* at most 64"),
    ],
)
def test_attention_without_kernels_is_refused_and_the_cpu_named(change, words):
    LLAMA.check("layer")
    with pytest.raises(ExportError, match=words) as refusal:
        LLAMA._replace(**change).check("layer")
    assert "Export for the CPU" in str(refusal.value)
