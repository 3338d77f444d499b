"""Timed runs: what is fed, what comes back, what is refused. Never how long it took."""

import dataclasses

import numpy as np
import pytest

from kvconv.bench import Measurement
from kvconv.bench.sample import Load
from kvconv.errors import CacheFullError, PromptError
from kvconv.runtime import Generator
from scripted_session import MANIFEST, TOKENIZER, ScriptedSession, hashed
from tiny_bundle import BOS, EOS, MAX_SEQUENCE_LENGTH, PAD, TinyDecoder, write_bundle


def scripted(script=hashed, **options) -> Measurement:
    manifest = dataclasses.replace(MANIFEST, eos_token_ids=())
    return Measurement(Generator(ScriptedSession(script, manifest), TOKENIZER, **options))


def test_run_feeds_the_prompt_in_chunks_and_then_single_ids():
    measurement = scripted(prefill_chunk=4)
    prompts = measurement.prompts(10, 1)
    sample = measurement.run(prompts, 3)
    assert measurement.generator.session.run_lengths == [4, 4, 2, 1, 1, 1]
    seen = prompts[0].tolist()
    for token_id in sample.token_ids:
        assert token_id == hashed(seen)
        seen.append(token_id)
    assert (sample.context, sample.batch, sample.num_decoded) == (10, 1, 3)
    assert sample.prefill_s > 0
    assert sample.decode_s > 0


def test_run_of_a_batch_gives_the_first_rows_ids():
    measurement = scripted()
    prompts = measurement.prompts(7, 3)
    together = measurement.run(prompts, 5)
    assert together.token_ids == measurement.run(prompts[:1], 5).token_ids
    assert together.batch == 3
    assert len(together.token_ids) == 6


def test_run_of_a_bundle_does_not_end_at_eos(tmp_path):
    decoder = TinyDecoder()
    decoder.weights["lm_head"][:] = 0
    decoder.weights["lm_head"][0, EOS] = 1  # the likeliest id after any token
    decoder.weights["embedding"][:, 0] = 1000
    measurement = Measurement.open(write_bundle(tmp_path / "bundle", decoder=decoder), threads=1)
    assert measurement.run(measurement.prompts(4, 1), 5).token_ids == (EOS,) * 6


def test_prompts_are_the_same_each_time_and_never_special():
    prompts = scripted().prompts(1000, 2)
    assert prompts.shape == (2, 1000)
    assert prompts.dtype == np.int64
    np.testing.assert_array_equal(prompts, scripted().prompts(1000, 2))
    assert not {BOS, EOS, PAD} & set(prompts.ravel().tolist())
    assert (prompts[0] != prompts[1]).any()


def test_prompts_of_a_tokenizer_with_special_tokens_only_are_refused(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "is_silent", lambda token_id: True)
    with pytest.raises(PromptError, match="no token with a text"):
        scripted().prompts(3, 1)


@pytest.mark.parametrize("fits", [True, False])
def test_depth_beyond_the_model_is_refused_with_both_numbers(tmp_path, fits):
    measurement = Measurement.open(write_bundle(tmp_path / "bundle"), threads=1)
    depth = MAX_SEQUENCE_LENGTH - 11 + (not fits)
    if fits:
        measurement.check([4, depth], gen=10, batch=1)
        assert len(measurement.run(measurement.prompts(depth, 1), 10).token_ids) == 11
        return
    with pytest.raises(CacheFullError, match=f"at most {MAX_SEQUENCE_LENGTH - 11}") as caught:
        measurement.check([4, depth], gen=10, batch=1)
    assert caught.value.needed == MAX_SEQUENCE_LENGTH + 1
    assert caught.value.capacity == MAX_SEQUENCE_LENGTH


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [(9, [4, 1, 1, 1, 1]), (6, [1, 1, 1, 1, 1]), (5, [1, 1, 1, 1]), (3, [1, 1])],
)
def test_warm_up_fits_a_model_of_few_tokens(tokens, lengths):
    measurement = scripted(max_sequence_length=tokens)
    measurement.warm_up(1)
    assert measurement.generator.session.run_lengths == lengths


def test_load_is_unknown_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr("kvconv.bench.sample._STAT", tmp_path / "absent")
    with Load.during() as load:
        pass
    assert load.cores is None
