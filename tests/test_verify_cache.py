"""Bundles with narrow and quantised caches: what verification says of right and wrong ones."""

import pytest

from kvconv.converter import ExportOptions, export
from kvconv.errors import VerificationError
from kvconv.manifest import FLOAT_CACHE, FLOAT_WEIGHTS, CheckResult, Verification, read_manifest
from kvconv.runtime import Bundle, Session
from kvconv.verify import Verifier
from kvconv.verify.checks import run_checks
from kvconv.verify.pytorch import make_reference
from tiny_decoders import tiny_model
from wrong_bundles import (
    copy_wrong,
    drop_softcap,
    drop_window,
    ignore_padding,
    skip_query_key_norm,
    swap_cos_and_sin,
)

STRICT = {"whole prefill", "decode, 16 steps", "rewind and re-prompt", "left-padded batch"}
ALL = {FLOAT_CACHE, *STRICT}


def checks(folder, model_type):
    """Verify a bundle as `kvconv verify` does; returns check name -> result."""
    bundle = Bundle.open(folder)
    model = tiny_model(model_type)
    reference = make_reference(model, None, prompt_tokens=24, max_sequence_length=128)
    result = run_checks(Session(bundle, threads=1), bundle.manifest, reference)
    return {check.name: check for check in result.checks}


def failed(found):
    return {name for name, check in found.items() if not check.passed}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_right_bundle_passes_and_says_what_its_cache_lost(exported, dtype):
    manifest = read_manifest(exported("llama", kv_cache_dtype=dtype).path)
    found = {check.name: check for check in manifest.verification.checks}
    assert found.keys() == ALL
    assert failed(found) == set()
    lost = found.pop(FLOAT_CACHE)
    assert lost.kl > 10 * max(check.kl for check in found.values())
    assert {layer.dtype for layer in manifest.cache_layers} == {dtype}


@pytest.mark.kinds
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrow_cache_is_compared_with_pytorch_throughout(exported, dtype):
    report = exported("gemma3_text", kv_cache_dtype=dtype)
    found = {check.name: check for check in report.verification.checks}
    assert found.keys() == {*STRICT, "chunked prefill"}
    assert failed(found) == set()


@pytest.mark.kinds
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3", "gptj", "gpt_oss", "bloom"])
def test_all_kinds_of_attention_pass_with_an_int4_cache(exported, model_type):
    report = exported(model_type, kv_cache_dtype="int4")
    assert report.verification.status == "passed"
    assert {check.name for check in report.verification.checks} == ALL


@pytest.mark.kinds
def test_latent_attention_has_a_quantised_cache_of_two_widths(checkpoint, tmp_path):
    model = checkpoint("deepseek_v3", first_k_dense_replace=2)  # no experts, which may flip
    options = ExportOptions(kv_cache_dtype="int4")
    report = export(str(model), tmp_path / "bundle", options, Verifier(prompt_tokens=24, threads=1))
    assert report.verification.status == "passed"
    session = Session(Bundle.open(report.path), threads=1)
    # 12 numbers of a key and 8 of a value: a group of 20 and one of 16 bytes, two scales of 2.
    assert session.new_cache(2, 5).nbytes == 2 * 5 * 2 * (20 + 16 + 2 * 2)


@pytest.mark.kinds
def test_quantised_weights_and_cache_are_told_apart(exported):
    report = exported("llama", kv_cache_dtype="int8", weights="int4")
    found = {check.name: check for check in report.verification.checks}
    assert found.keys() == {FLOAT_WEIGHTS, *ALL}
    assert found[FLOAT_WEIGHTS].kl > 3 * found[FLOAT_CACHE].kl
    again = checks(report.path, "llama")  # PyTorch's weights are not rounded now
    assert again.keys() == {FLOAT_WEIGHTS, *STRICT}
    assert failed(again) == set()


@pytest.mark.kinds
@pytest.mark.parametrize(
    ("model_type", "dtype", "change", "wrong"),
    [
        ("llama", "int8", swap_cos_and_sin, {FLOAT_CACHE}),
        ("llama", "int4", swap_cos_and_sin, {FLOAT_CACHE}),
        ("gemma3_text", "int8", drop_window, {FLOAT_CACHE}),
        ("gemma3_text", "int4", drop_window, {FLOAT_CACHE}),
        ("gemma2", "int8", drop_softcap, {FLOAT_CACHE}),
        ("gemma3_text", "int8", skip_query_key_norm, {FLOAT_CACHE}),
        ("llama", "int8", ignore_padding, {"left-padded batch"}),
        ("llama", "int4", ignore_padding, {"left-padded batch"}),
    ],
)
def test_a_wrong_bundle_fails_where_it_is_wrong(
    exported, tmp_path, model_type, dtype, change, wrong
):
    right = exported(model_type, kv_cache_dtype=dtype).path
    found = checks(copy_wrong(right, tmp_path / "wrong", change), model_type)
    assert failed(found) >= wrong


def test_cache_that_lost_too_much_is_told_what_helps():
    check = CheckResult(FLOAT_CACHE, 9, 7.0, 1.0, 0.5, 0.6, False, ("the logits differ by 7",))
    with pytest.raises(VerificationError, match="--kv-cache-dtype int8, or float16"):
        Verification("failed", 1.0, (check,)).require_passed()
