"""Verification of bundles with rings, over prompts that wrap them."""

from pathlib import Path

import pytest

from kvconv.converter import export
from kvconv.converter.model_sizes import read_sizes
from kvconv.manifest import read_manifest
from kvconv.runtime import Bundle, Session
from kvconv.verify import Verifier
from kvconv.verify.checks import run_checks
from kvconv.verify.pytorch import make_reference
from tiny_decoders import save_tiny, tiny_model
from wrong_bundles import copy_wrong, narrow_window

pytestmark = pytest.mark.kinds


@pytest.mark.parametrize(
    ("kind", "num_rings"), [("mistral", 2), ("gpt_oss", 1), ("gpt_neo", 1), ("llama4_text", 0)]
)
def test_verification_wraps_the_rings_and_the_plan_counts_them(
    kind: str, num_rings: int, tmp_path: Path
) -> None:
    """The rewind check goes beyond what the prompt's rings can take back, and starts over."""
    model = str(save_tiny(tmp_path / "model", kind, max_position_embeddings=4096))
    report = export(model, tmp_path / "bundle", verifier=Verifier(prompt_tokens=700, threads=1))
    assert report.rewrites["ring"] == num_rings
    assert report.verification.status == "passed"
    assert report.verification.not_checked == ()
    manifest = read_manifest(tmp_path / "bundle")
    assert sum(layer.cache_mode == "ring" for layer in manifest.cache_layers) == num_rings
    planned = read_sizes(model, dtype="float32", weights=None, cache_dtype="float32")
    assert planned.sizes.cache_layers == manifest.cache_layers


def test_prompt_that_fills_no_ring_is_named_as_not_checked(tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path / "model", "mistral", max_position_embeddings=4096))
    report = export(model, tmp_path / "bundle", verifier=Verifier(prompt_tokens=24, threads=1))
    (sentence,) = report.verification.not_checked
    assert "40 tokens do not fill one of 260 slots" in sentence
    assert "--prompt-tokens 516" in sentence


def test_ring_whose_window_misses_one_token_fails(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 4096}
    model = str(save_tiny(tmp_path / "model", "mistral", **config))
    export(model, tmp_path / "bundle")
    wrong = copy_wrong(tmp_path / "bundle", tmp_path / "wrong", narrow_window)
    reference = make_reference(
        tiny_model("mistral", **config), None, prompt_tokens=700, max_sequence_length=4096
    )
    bundle = Bundle.open(wrong)
    result = run_checks(Session(bundle, threads=1), bundle.manifest, reference)
    assert not any(check.passed for check in result.checks)
