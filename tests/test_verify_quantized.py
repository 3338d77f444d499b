"""Bundles with quantised weights: what verification says of right and of wrong ones."""

import dataclasses

import pytest

from kvconv.converter import ExportOptions, export
from kvconv.flavour import FLAVOURS
from kvconv.manifest import FLOAT_WEIGHTS, Verification, read_manifest
from kvconv.runtime import Bundle, Session
from kvconv.verify import Reference, Verifier
from kvconv.verify.checks import run_checks
from kvconv.verify.pytorch import make_reference
from tiny_decoders import tiny_model
from wrong_bundles import (
    copy_wrong,
    drop_alibi,
    drop_sinks,
    drop_softcap,
    drop_window,
    ignore_padding,
    swap_cos_and_sin,
)

ALL = {
    FLOAT_WEIGHTS,
    "whole prefill",
    "decode, 16 steps",
    "rewind and re-prompt",
    "chunked prefill",
    "left-padded batch",
}


class Keeping(Verifier):
    """Keeps the reference instead of comparing."""

    def compare(self, folder, reference):
        self.kept = Reference.load(reference.rewound())
        return Verification("skipped")


@pytest.fixture(scope="module")
def quantized(checkpoint, tmp_path_factory):
    """Give a factory: model type, options -> bundle folder and the reference of its export."""
    done = {}

    def make(model_type, **options):
        key = (model_type, *options.items())
        if key not in done:
            folder = tmp_path_factory.mktemp("quantized") / model_type
            verifier = Keeping(prompt_tokens=24, threads=1)
            export(str(checkpoint(model_type)), folder, ExportOptions(**options), verifier)
            done[key] = (folder, verifier.kept)
        return done[key]

    return make


def checks(folder, reference):
    bundle = Bundle.open(folder)
    result = run_checks(Session(bundle, threads=1), bundle.manifest, reference)
    return {check.name: check for check in result.checks}


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_right_bundle_passes_and_says_what_it_lost(quantized, weights):
    folder, reference = quantized("llama", weights=weights)
    found = checks(folder, reference)
    assert found.keys() == ALL
    assert all(check.passed for check in found.values())
    lost = found.pop(FLOAT_WEIGHTS)
    assert lost.kl > (10 if weights == "int4" else 1) * min(check.kl for check in found.values())
    manifest = read_manifest(folder)
    assert manifest.weights_dtype == weights
    assert manifest.quantization.accuracy_level == FLAVOURS["flash"].accuracy_levels[0]
    assert sum(manifest.quantization.stored_bytes.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_float16_activations_have_their_own_rounding(quantized, weights):
    folder, reference = quantized("llama", weights=weights, dtype="float16")
    found = checks(folder, reference)
    assert found.keys() == ALL
    assert all(check.passed for check in found.values())


def test_without_integer_activations_a_right_bundle_is_as_exact_as_float(quantized):
    folder, reference = quantized("llama", weights="int4", accuracy_level=1)
    found = checks(folder, reference)
    assert all(check.passed for check in found.values())
    assert found["whole prefill"].max_abs < 2e-4


@pytest.mark.kinds
@pytest.mark.parametrize(
    ("model_type", "level", "change", "wrong"),
    [
        ("llama", 2, swap_cos_and_sin, ALL),
        ("llama", 4, ignore_padding, {"left-padded batch"}),
        ("gemma3_text", 4, drop_window, ALL),
        ("gemma2", 2, drop_softcap, ALL - {FLOAT_WEIGHTS}),
        ("gpt_oss", 4, drop_sinks, ALL - {FLOAT_WEIGHTS}),
        ("bloom", 1, drop_alibi, ALL - {FLOAT_WEIGHTS}),
    ],
)
def test_a_wrong_int4_bundle_fails(quantized, tmp_path, model_type, level, change, wrong):
    folder, reference = quantized(model_type, weights="int4", accuracy_level=level)
    assert all(check.passed for check in checks(folder, reference).values())
    found = checks(copy_wrong(folder, tmp_path / "wrong", change), reference)
    assert {name for name, check in found.items() if not check.passed} >= wrong


@pytest.mark.kinds
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_a_mixture_of_experts_passes_at_the_default_accuracy_level(quantized, model_type):
    folder, reference = quantized(model_type, weights="int4")
    found = checks(folder, reference)
    assert found.keys() == ALL
    assert all(check.passed for check in found.values())


@pytest.mark.slow
def test_16_bit_activations_are_held_to_much_less_than_8_bit_ones(quantized):
    folder, reference = quantized("llama", weights="int4", accuracy_level=2)
    assert all(check.passed for check in checks(folder, reference).values())
    coarse, _ = quantized("llama", weights="int4", accuracy_level=4)
    manifest = read_manifest(coarse)
    quantization = dataclasses.replace(manifest.quantization, accuracy_level=2)
    found = run_checks(
        Session(Bundle.open(coarse), threads=1),
        dataclasses.replace(manifest, quantization=quantization),
        reference,
    )
    failed = {check.name for check in found.checks if not check.passed}
    assert failed == ALL - {FLOAT_WEIGHTS}


def test_with_float_weights_the_bundle_is_compared_with_itself(quantized, tmp_path):
    """What `kvconv verify` does, which cannot round PyTorch's weights."""
    folder, _ = quantized("llama", weights="int4")
    reference = make_reference(tiny_model("llama"), None, prompt_tokens=24, max_sequence_length=128)
    found = checks(folder, reference)
    assert found.keys() == ALL - {"chunked prefill"}
    assert all(check.passed for check in found.values())
    wrong = copy_wrong(folder, tmp_path / "padding", ignore_padding)
    assert not checks(wrong, reference)["left-padded batch"].passed
    wrong = copy_wrong(folder, tmp_path / "rotation", swap_cos_and_sin)
    assert not checks(wrong, reference)[FLOAT_WEIGHTS].passed


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["standard", "gqa"])
def test_onnx_runtimes_operators_pass_too(quantized, attention):
    folder, reference = quantized("llama", weights="int4", attention=attention)
    assert all(check.passed for check in checks(folder, reference).values())
