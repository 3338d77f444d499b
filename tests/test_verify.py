"""Logit comparison: what it measures and what fails it."""

import numpy as np
import pytest

from kvconv.errors import KvconvError, VerificationError
from kvconv.manifest import Verification
from kvconv.verify import Continuation, Reference, StoredReference, Verifier, compare_logits


@pytest.fixture
def logits():
    return np.random.default_rng(3).normal(size=(7, 50)).astype(np.float32) * 5


def test_equal_logits_pass_with_zeros(logits):
    result = compare_logits("x", logits.copy(), logits, 1e-3)
    assert (result.max_abs, result.mean_abs, result.kl, result.top1) == (0, 0, 0, 1)
    assert result.passed
    assert result.positions == 7


def test_one_wrong_logit_is_measured_and_fails(logits):
    found = logits.copy()
    found[4, 9] -= 0.5
    result = compare_logits("x", found, logits, 1e-3)
    assert result.max_abs == pytest.approx(0.5)
    assert result.mean_abs == pytest.approx(0.5 / logits.size)
    assert result.kl > 0
    assert not result.passed


def test_swapped_argmax_within_tolerance_is_a_tie_and_beyond_it_a_failure(logits):
    wanted = logits.copy()
    wanted[0, :2] = 40, 40.0005
    found = wanted.copy()
    found[0, :2] = 40.0005, 40
    result = compare_logits("x", found, wanted, 1e-3)
    assert result.top1 == pytest.approx(6 / 7)
    assert result.passed
    assert not compare_logits("x", found, wanted, 1e-4).passed


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_fail(logits, poison):
    found = logits.copy()
    found[2, 3] = poison
    result = compare_logits("x", found, logits, 1e9)
    assert not result.passed
    assert np.isfinite([result.max_abs, result.mean_abs, result.kl]).all()


def test_kl_is_the_mean_over_positions_in_nats():
    wanted = np.log(np.array([[0.5, 0.5], [0.5, 0.5]], np.float32))
    found = np.log(np.array([[0.25, 0.75], [0.5, 0.5]], np.float32))
    exact = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert compare_logits("x", found, wanted, 9).kl == pytest.approx(exact / 2, rel=1e-5)


def test_require_passed_raises_with_the_numbers(logits):
    failed = compare_logits("chunked prefill", logits + 1, logits, 1e-3)
    with pytest.raises(
        VerificationError, match="'chunked prefill' the logits differ by up to 1 "
    ) as caught:
        Verification("failed", 1e-3, (failed,)).require_passed()
    assert caught.value.check == "chunked prefill"
    assert caught.value.max_abs == pytest.approx(1)
    assert caught.value.tolerance == 1e-3


def test_reference_survives_the_way_to_the_process_that_checks(logits):
    def some(rows):
        return Continuation([5, 6, 7], logits[:rows])

    reference = Reference(some(3), some(1), (some(2), some(4)), some(5), ("a sentence",))
    stored = StoredReference(reference)
    loaded = Reference.load(stored.path)
    assert loaded.not_checked == ("a sentence",)
    parts = [(r.prompt, r.decoded, r.reprompted, *r.rows) for r in (loaded, reference)]
    for found, wanted in zip(*parts, strict=True):
        assert found.input_ids == wanted.input_ids
        np.testing.assert_array_equal(found.logits, wanted.logits)


def test_failure_of_the_process_that_checks_is_told(tmp_path, logits):
    one = Continuation([1], logits[:1])
    with pytest.raises(KvconvError, match="There is no bundle at"):
        Verifier().compare(tmp_path / "nowhere", StoredReference(Reference(one, one, (), one, ())))
