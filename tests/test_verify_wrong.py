"""Verification fails bundles that are wrong in one way, in the checks where that shows."""

import pytest

from kvconv.runtime import Bundle, Session
from kvconv.verify.checks import run_checks
from kvconv.verify.pytorch import make_reference
from tiny_decoders import tiny_model
from wrong_bundles import (
    change_weight,
    copy_wrong,
    drop_alibi,
    drop_chunks,
    drop_sinks,
    drop_softcap,
    drop_window,
    ignore_padding,
    rotate_all_of_a_head,
    rotate_halves,
    skip_query_key_norm,
    swap_cos_and_sin,
    unscale_rope,
)

pytestmark = pytest.mark.kinds
ALL = {
    "whole prefill",
    "decode, 16 steps",
    "rewind and re-prompt",
    "chunked prefill",
    "left-padded batch",
}


@pytest.mark.parametrize(
    ("model_type", "dtype", "change", "wrong"),
    [
        ("llama", "float32", change_weight, ALL),
        ("qwen3", "float16", change_weight, ALL),
        ("llama", "float32", swap_cos_and_sin, ALL),
        ("qwen3", "float16", swap_cos_and_sin, ALL),
        ("gemma3_text", "float32", drop_window, ALL),
        ("gemma2", "float32", drop_softcap, ALL),
        ("gpt_oss", "float32", drop_sinks, ALL),
        ("bloom", "float32", drop_alibi, ALL),
        ("gpt_neox", "float32", rotate_all_of_a_head, ALL),
        ("gptj", "float32", rotate_halves, ALL),
        ("qwen3", "float32", skip_query_key_norm, ALL),
        ("llama+llama3", "float32", unscale_rope, ALL),
        ("llama4_text", "float32", drop_chunks, ALL),
        ("llama", "float32", ignore_padding, {"left-padded batch"}),
        ("qwen3", "float16", ignore_padding, {"left-padded batch"}),
    ],
)
def test_wrong_bundle_fails_where_it_is_wrong(exported, tmp_path, model_type, dtype, change, wrong):
    options = {} if dtype == "float32" else {"dtype": dtype}
    right = exported(model_type, **options).path
    model = tiny_model(model_type)
    reference = make_reference(
        model if dtype == "float32" else model.half(),
        None,
        prompt_tokens=24,
        max_sequence_length=128,
    )
    failed = []
    for folder in (right, copy_wrong(right, tmp_path / "wrong", change)):
        bundle = Bundle.open(folder)
        result = run_checks(Session(bundle, threads=1), bundle.manifest, reference)
        assert {check.name for check in result.checks} == ALL
        failed.append({check.name for check in result.checks if not check.passed})
        assert result.status == ("failed" if failed[-1] else "passed")
    assert failed == [set(), wrong]
