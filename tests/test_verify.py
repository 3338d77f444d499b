"""Verification as a library: the comparison, the way of the reference, the process that checks."""

import dataclasses
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvconv.cli.verify import describe
from kvconv.errors import KvconvError, UnsupportedModelError, VerificationError
from kvconv.manifest import Verification, read_manifest
from kvconv.names import MANIFEST_FILE
from kvconv.runtime import Bundle, Session
from kvconv.verify import (
    Continuation,
    Limits,
    Reference,
    StoredReference,
    Verifier,
    compare_logits,
    record,
    require_same_model,
)
from kvconv.verify.checks import run_checks
from kvconv.verify.pytorch import _forward, make_reference
from tiny_bundle import VOCAB_SIZE, TinyDecoder, write_bundle
from tiny_decoders import tiny_model

LIMITS = Limits(max_abs=1e-3, tie=1e-3, kl=1e-3**2 / 32)


@pytest.fixture
def logits():
    return np.random.default_rng(3).normal(size=(7, 50)).astype(np.float32) * 5


def reference_of(*logits):
    """Return a reference whose parts hold these logits, the first ones as the prompt's."""
    prompt, decoded, reprompted, *rows = [
        Continuation(list(range(len(rows))), list(range(len(rows))), rows) for rows in logits
    ]
    return Reference(prompt, decoded, tuple(rows), reprompted, ("a sentence",))


def test_equal_logits_pass_with_zeros(logits):
    result = compare_logits("x", logits.copy(), logits, LIMITS)
    assert (result.max_abs, result.mean_abs, result.kl, result.top1) == (0, 0, 0, 1)
    assert result.passed
    assert result.positions == 7


def test_one_wrong_logit_is_measured_and_fails(logits):
    found = logits.copy()
    found[4, 9] -= 0.5
    result = compare_logits("x", found, logits, LIMITS)
    assert result.max_abs == pytest.approx(0.5)
    assert result.mean_abs == pytest.approx(0.5 / logits.size)
    assert result.kl > 0
    assert not result.passed


def test_swapped_argmax_is_a_tie_within_its_margin_and_a_failure_beyond_it(logits):
    wanted = logits.copy()
    wanted[0, :2] = 40, 40.0005
    found = wanted.copy()
    found[0, :2] = 40.0005, 40
    result = compare_logits("x", found, wanted, LIMITS)
    assert result.top1 == pytest.approx(6 / 7)
    assert result.passed
    assert not compare_logits("x", found, wanted, dataclasses.replace(LIMITS, tie=4e-4)).passed


def test_kl_alone_can_fail(logits):
    found = logits + np.where(np.arange(50) % 2, 9e-4, -9e-4).astype(np.float32)
    result = compare_logits("x", found, logits, LIMITS)
    assert result.max_abs < LIMITS.max_abs
    assert result.top1 == 1
    assert result.kl > LIMITS.kl
    assert not result.passed


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_fail(logits, poison):
    found = logits.copy()
    found[2, 3] = poison
    result = compare_logits("x", found, logits, Limits(1e9, 1e9, 1e9))
    assert not result.passed
    assert np.isfinite([result.max_abs, result.mean_abs, result.kl]).all()


def test_kl_is_the_mean_over_positions_in_nats():
    wanted = np.log(np.array([[0.5, 0.5], [0.5, 0.5]], np.float32))
    found = np.log(np.array([[0.25, 0.75], [0.5, 0.5]], np.float32))
    exact = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert compare_logits("x", found, wanted, LIMITS).kl == pytest.approx(exact / 2, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8 cache", "int4 cache"])
@pytest.mark.parametrize("scale", [1e-3, 0.05, 1.0, 30.0])
def test_unrelated_logits_fail_at_every_scale(dtype, scale):
    random = np.random.default_rng(5)
    wanted, found = random.normal(size=(2, 20, 200)).astype(np.float32) * scale
    reference = reference_of(wanted, wanted, wanted)
    assert reference.spread == pytest.approx(scale, rel=0.1)
    limits = Limits.of(dtype, reference.spread)
    assert not compare_logits("x", found, wanted, limits).passed
    # A constant added to all logits changes no probability and buys no tolerance.
    assert reference_of(wanted + 100, wanted, wanted).spread == pytest.approx(scale, rel=0.1)
    # The same logits in another order of tokens, and flat ones.
    assert not compare_logits("x", wanted[:, ::-1], wanted, limits).passed
    assert not compare_logits("x", np.zeros_like(wanted), wanted, limits).passed


def test_spread_is_that_of_the_sequence_with_the_smallest(logits):
    small = logits / 100
    assert reference_of(logits, logits, logits, small).spread == pytest.approx(
        small.std(axis=1).mean(), rel=1e-5
    )


def test_require_passed_raises_with_the_numbers(logits):
    failed = compare_logits("chunked prefill", logits + 1, logits, LIMITS)
    with pytest.raises(
        VerificationError,
        match=r"'chunked prefill' the logits differ by up to 1 \(tol.* 0.001\);",
    ) as caught:
        Verification("failed", 1e-3, (failed,)).require_passed()
    assert caught.value.check == "chunked prefill"
    assert caught.value.max_abs == pytest.approx(1)
    assert caught.value.tolerance == 1e-3
    assert caught.value.exceeded == failed.exceeded


def test_each_limit_that_is_exceeded_is_named_with_both_values(logits):
    found = logits.copy()
    found[2] = found[2, ::-1]
    loose = Limits(1e9, 1e9, 1e9)
    assert compare_logits("x", found, logits, loose).exceeded == ()
    for name, limit, words in [
        ("max_abs", 0.25, r"the logits differ by up to \S+ \(tolerance 0.25\)"),
        ("kl", 0.5, r"the KL divergence is \S+ \(tolerance 0.5\)"),
        (
            "tie",
            0.125,
            r"another token is likeliest .* puts \S+ lower \(tolerance 0.125\)",
        ),
    ]:
        result = compare_logits("x", found, logits, dataclasses.replace(loose, **{name: limit}))
        (sentence,) = result.exceeded
        assert re.fullmatch(words, sentence)
        assert not result.passed


def test_reference_survives_the_way_to_the_process_that_checks(logits):
    reference = reference_of(*(logits[:rows] for rows in (3, 1, 5, 2, 4)))
    stored = StoredReference(reference)
    loaded = Reference.load(stored.rewound())
    assert loaded.not_checked == ("a sentence",)
    parts = [(r.prompt, r.decoded, r.reprompted, *r.rows) for r in (loaded, reference)]
    for found, wanted in zip(*parts, strict=True):
        assert found.input_ids == wanted.input_ids
        assert found.positions == wanted.positions
        np.testing.assert_array_equal(found.logits, wanted.logits)


def test_failure_of_the_process_that_checks_is_told(tmp_path, logits):
    with pytest.raises(KvconvError, match="There is no bundle at"):
        Verifier().compare(tmp_path / "nowhere", StoredReference(reference_of(*[logits] * 4)))


def test_process_that_checks_runs_nothing_from_the_current_folder(exported, tmp_path, monkeypatch):
    poison = "from pathlib import Path; Path('ran').touch(); raise RuntimeError('poisoned')"
    for name in ("numpy", "json", "kvconv", "onnxruntime"):
        (tmp_path / f"{name}.py").write_text(poison)
    monkeypatch.chdir(tmp_path)
    verifier = Verifier(prompt_tokens=24, threads=1)
    reference = verifier.reference(tiny_model("llama"), None, max_sequence_length=128)
    result = verifier.compare(exported("llama").path, reference)
    assert result.status == "passed"
    assert not (tmp_path / "ran").exists()


def test_process_that_checks_imports_neither_torch_nor_the_converter():
    code = (
        "import sys, kvconv.verify.__main__\n"
        "names = {'torch', 'transformers', 'onnx', 'kvconv.converter', 'kvconv.verify.pytorch'}\n"
        "print(sorted(names & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def tiny_reference(decoder, length):
    """Return what PyTorch would say about a hand-built decoder, from its float64 reference."""
    random = np.random.default_rng(length)
    prompt = random.integers(0, 256, length).tolist()
    other = [*prompt[: length // 2], *random.integers(0, 256, length // 4 + 1).tolist()]

    def logits(ids, first=0):
        positions = list(range(first, len(ids)))
        return Continuation(ids, positions, decoder.reference(ids)[first:].astype(np.float32))

    decoded = logits([*prompt, 7], length)
    return Reference(
        logits(prompt), decoded, (decoded,), logits(other, length // 2), ("a sentence",)
    )


@pytest.mark.parametrize("length", [1, 2, 3, 8, 25])
def test_flavour_without_padding_runs_an_equal_length_batch_and_says_so(tmp_path, length):
    decoder = TinyDecoder()
    bundle = Bundle.open(write_bundle(tmp_path / "bundle", decoder=decoder, attention="gqa"))
    session, reference = Session(bundle, threads=1), tiny_reference(decoder, length)
    result = run_checks(session, bundle.manifest, reference)
    assert result.status == "passed"
    assert [check.name for check in result.checks] == [
        "whole prefill", "decode, 1 steps", "rewind and re-prompt", "chunked prefill",
        "equal-length batch",
    ]  # fmt: skip
    sentences = (
        "left-padded batch: the gqa flavour takes no padding",
        "chunks of a batch: the gqa flavour takes none",
    )
    assert result.not_checked == ("a sentence", *sentences)
    assert all(f"not checked: {sentence}" in describe(result) for sentence in sentences)
    # Either sequence's last logits being wrong fails the batch.
    for part in (reference.prompt, reference.reprompted):
        row = min(len(part.logits), len(reference.reprompted.input_ids)) - 1
        part.logits[row] += 1
        assert not run_checks(session, bundle.manifest, reference).checks[-1].passed
        part.logits[row] -= 1


@pytest.mark.parametrize("limit", [2, 3, 5, 17])
def test_short_bundles_are_checked_within_their_length(exported, tmp_path, limit):
    folder = shutil.copytree(exported("llama").path, tmp_path / "short")
    dataclasses.replace(read_manifest(folder), max_sequence_length=limit).write(folder)
    bundle = Bundle.open(folder)
    reference = make_reference(
        tiny_model("llama"), None, prompt_tokens=None, max_sequence_length=limit
    )
    assert len(reference.decoded.input_ids) <= limit
    result = run_checks(Session(bundle, threads=1), bundle.manifest, reference)
    assert result.status == "passed"


@pytest.mark.parametrize("length", [24, 60])
def test_few_logits_are_spread_over_the_prompt(exported, monkeypatch, length):
    """As for a large vocabulary: too many logits to keep them all, or to run them at once."""
    for module in ("pytorch", "checks"):
        monkeypatch.setattr(f"kvconv.verify.{module}.MAX_LOGITS", 8 * VOCAB_SIZE + 1)
    reference = make_reference(
        tiny_model("llama"), None, prompt_tokens=length, max_sequence_length=128
    )
    positions = reference.prompt.positions
    assert len(positions) <= 8
    assert positions[-1] == length - 1
    assert max(np.diff([0, *positions])) <= length // 6 + 1
    bundle = Bundle.open(exported("llama").path)
    session, kept = Session(bundle, threads=1), []
    run = session.run

    def counted(*args, num_logits_to_keep=1, **kwargs):
        kept.append(num_logits_to_keep)
        return run(*args, num_logits_to_keep=num_logits_to_keep, **kwargs)

    monkeypatch.setattr(session, "run", counted)
    for most, whole in ((2**25, len(positions)), (0, sum(p >= length - 8 for p in positions))):
        monkeypatch.setattr("kvconv.verify.checks._MAX_WHOLE_LOGITS", most)
        kept.clear()
        result = run_checks(session, bundle.manifest, reference)
        assert result.status == "passed"
        compared = {check.name: check.positions for check in result.checks}
        assert compared["whole prefill"] == whole
        assert compared["chunked prefill"] == len(positions)
        assert max(kept[1:]) <= 8
        assert kept[0] == (length if most else 8)


def test_model_that_cannot_select_logits_gives_the_same_reference(monkeypatch):
    class Whole(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids, use_cache):
            return self.model(input_ids=input_ids, use_cache=use_cache)

    model, ids, positions = tiny_model("llama"), list(range(20)), [3, 11, 19]
    selected, whole = (_forward(each, ids, positions) for each in (model, Whole(model)))
    assert selected.logits.shape == (3, VOCAB_SIZE)
    np.testing.assert_allclose(whole.logits, selected.logits, atol=1e-5)


def test_model_that_overflows_in_pytorch_is_refused():
    model = tiny_model("llama").half()
    model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM in float16 are not finite.*--dtype float32"
    ):
        Verifier(prompt_tokens=24).reference(model, None, max_sequence_length=128)


def test_model_that_padding_changes_in_pytorch_has_no_padded_check_and_says_so(exported):
    bart = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "vocab_size": 259}
    references = [
        make_reference(model, None, prompt_tokens=24, max_sequence_length=100)
        for model in (tiny_model("bart", **bart), tiny_model("bloom"), tiny_model("llama"))
    ]
    assert [len(reference.rows) for reference in references] == [0, 3, 3]
    assert [len(reference.not_checked) for reference in references] == [1, 0, 0]
    (sentence,) = references[0].not_checked
    assert "BartForCausalLM counts padded slots as positions" in sentence
    bundle = Bundle.open(exported("llama").path)
    unpadded = dataclasses.replace(references[2], rows=(), not_checked=(sentence,))
    result = run_checks(Session(bundle, threads=1), bundle.manifest, unpadded)
    assert (result.status, len(result.checks)) == ("passed", 4)
    assert result.not_checked == (sentence,)


def test_failed_record_leaves_the_manifest_and_nothing_else(exported, tmp_path, monkeypatch):
    manifest = read_manifest(exported("llama").path)
    manifest.write(tmp_path)

    def fail(self, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="Read-only"):
        record(tmp_path, manifest, Verification("skipped"))
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3", {}, "architecture is Qwen3ForCausalLM, the bundle's is LlamaForCausalLM"),
        ("llama", {"vocab_size": 300}, "vocabulary size is 300, the bundle's is 259"),
        ("llama", {"intermediate_size": 64}, "widest layer is 96, the bundle's is 80"),
        ("llama", {"num_hidden_layers": 3}, "number of cache layers is 3, the bundle's is 2"),
        (
            "llama",
            {"num_key_value_heads": 4},
            r"layer 0 .* is \(4, 8, 8\), the bundle's is \(2, 8, 8\)",
        ),
    ],
)
def test_another_model_is_refused_with_both_values(exported, model_type, changes, message):
    manifest = read_manifest(exported("llama").path)
    require_same_model(manifest, tiny_model("llama"))
    with pytest.raises(KvconvError, match=f"{message}.*Give llama with --model"):
        require_same_model(manifest, tiny_model(model_type, **changes))
