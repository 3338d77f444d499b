"""Steps of one token per row, against the float64 reference."""

import numpy as np
import pytest

from kvconv import names
from kvconv.errors import CacheFullError, KvconvError
from kvconv.runtime import Bundle, Session
from tiny_bundle import VOCAB_SIZE, TinyDecoder, write_bundle

TOLERANCE = 1e-4
TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33]
DECODER = TinyDecoder(seed=3)


@pytest.fixture(scope="module", params=["standard", "flash", "gqa"])
def session(request, tmp_path_factory) -> Session:
    folder = tmp_path_factory.mktemp("bundles") / request.param
    bundle = Bundle.open(write_bundle(folder, decoder=DECODER, attention=request.param))
    return Session(bundle, threads=1)


def started(session, prompts, capacity=32):
    """Prefill a batch and return its cache and step."""
    cache = session.new_cache(len(prompts), capacity)
    longest = max(map(len, prompts))
    ids = np.zeros((len(prompts), longest), np.int64)
    mask = np.ones((len(prompts), capacity), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, : longest - len(prompt)] = 0
    logits = session.run(cache, ids, attention_mask=mask[:, :longest])
    return cache, session.decode_step(cache, mask, logits), logits


def test_steps_equal_the_reference_and_write_into_one_array(session):
    cache, step, logits = started(session, [TOKENS[:4]])
    for end in range(5, len(TOKENS) + 1):
        assert step.run(np.array(TOKENS[end - 1 : end])) is logits
        expected = DECODER.reference(TOKENS[:end])[-1]
        assert logits.shape == (1, 1, VOCAB_SIZE)
        assert np.abs(logits[0, 0] - expected).max() <= TOLERANCE
        assert cache.length == end


@pytest.mark.parametrize("session", ["standard", "flash"], indirect=True)  # gqa takes no padding
def test_steps_of_a_padded_batch_equal_single_rows(session):
    prompts = [TOKENS[:5], TOKENS[3:5], TOKENS[:1]]
    _, step, logits = started(session, prompts)
    for token in (7, 9, 200):
        prompts = [[*prompt, token + row] for row, prompt in enumerate(prompts)]
        step.run(np.array([token, token + 1, token + 2]))
        for row, prompt in enumerate(prompts):
            assert np.abs(logits[row, 0] - DECODER.reference(prompt)[-1]).max() <= TOLERANCE


def test_many_steps_equal_the_reference(session):
    prompts = [TOKENS[:5], TOKENS[3:8]]
    _, step, logits = started(session, prompts, capacity=48)
    for i in range(43):
        prompts = [[*prompt, (7 * i + row) % 256] for row, prompt in enumerate(prompts)]
        step.run([prompt[-1] for prompt in prompts])
    for row, prompt in enumerate(prompts):
        assert np.abs(logits[row, 0] - DECODER.reference(prompt)[-1]).max() <= TOLERANCE


def test_step_that_failed_can_be_run_again(session):
    cache, step, logits = started(session, [TOKENS[:4]])
    execute = step._execute

    def fail(binding):
        raise KvconvError("failed")

    step._execute = fail
    with pytest.raises(KvconvError, match="failed"):
        step.run([5])
    assert cache.length == 4
    step._execute = execute
    step.run([5])
    step.run([6])
    expected = DECODER.reference([*TOKENS[:4], 5, 6])[-1]
    assert np.abs(logits[0, 0] - expected).max() <= TOLERANCE


def test_ids_and_positions_stay_bound_to_one_memory(session):
    cache, step, _ = started(session, [TOKENS[:4]])
    inputs = [names.INPUT_IDS, names.POSITION_IDS, names.NUM_LOGITS_TO_KEEP]
    binding = cache._binding
    before = [binding._bound_inputs[name].data_ptr() for name in inputs]
    step.run(np.array([5]))
    step.run(np.array([6]))
    assert [binding._bound_inputs[name].data_ptr() for name in inputs] == before


def test_step_beyond_the_capacity_is_refused_and_runs_nothing(session):
    cache, step, _ = started(session, [TOKENS[:4]], capacity=5)
    step.run(np.array([5]))
    with pytest.raises(CacheFullError):
        step.run(np.array([5]))
    assert cache.length == 5


def test_step_behind_somebody_elses_run_is_refused(session):
    cache, step, _ = started(session, [TOKENS[:4]])
    session.run(cache, [[5]])
    with pytest.raises(ValueError, match="5 tokens and not 4"):
        step.run(np.array([5]))
    cache.rewind(3)
    with pytest.raises(ValueError, match="3 tokens and not 4"):
        step.run(np.array([5]))
