"""Steps of one token per row, against the float64 reference."""

import numpy as np
import pytest

from kvconv import names
from kvconv.errors import CacheFullError, FlavourError, KvconvError
from kvconv.manifest import CacheLayer
from kvconv.runtime import Bundle, Session
from kvconv.runtime.decode_step import DecodeStep
from kvconv.runtime.kv_cache import SharedBufferCache
from tiny_bundle import MAX_SEQUENCE_LENGTH, VOCAB_SIZE, TinyDecoder, write_bundle

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
    cache, _, logits = started(session, [TOKENS[:4]])
    failures = [KvconvError("failed")]

    def execute(binding):
        if failures:
            raise failures.pop()
        session._execute(binding)

    mask = np.ones((1, cache.capacity), np.int64)
    step = DecodeStep(cache, mask, logits, has_positions=True, execute=execute)
    with pytest.raises(KvconvError, match="failed"):
        step.run([5])
    assert cache.length == 4
    step.run([5])
    step.run([6])
    expected = DECODER.reference([*TOKENS[:4], 5, 6])[-1]
    assert np.abs(logits[0, 0] - expected).max() <= TOLERANCE


class NotingBinding:
    """Remembers what is bound, and the names in the order of binding."""

    def __init__(self):
        self.values, self.names = {}, []

    def bind_ortvalue_input(self, name, value):
        self.values[name] = value
        self.names.append(name)

    bind_ortvalue_output = bind_ortvalue_input


def test_only_the_mask_is_bound_anew_and_runs_read_what_is_written_in_place():
    binding = NotingBinding()
    cache = SharedBufferCache([CacheLayer(1, 4, 4, "float32")], 2, 8, lambda: binding)
    mask = np.ones((2, 8), np.int64)
    mask[1, 0] = 0
    read = []

    def execute(_):
        inputs = (names.INPUT_IDS, names.POSITION_IDS, names.ATTENTION_MASK)
        read.append([binding.values[name].numpy().tolist() for name in inputs])

    logits = np.zeros((2, 1, VOCAB_SIZE), np.float32)
    cache.commit_run(2)
    step = DecodeStep(cache, mask, logits, has_positions=True, execute=execute)
    binding.names.clear()
    step.run([5, 6])
    step.run([7, 8])
    assert binding.names == [names.ATTENTION_MASK] * 2
    assert read == [
        [[[5], [6]], [[2], [1]], mask[:, :3].tolist()],
        [[[7], [8]], [[3], [2]], mask[:, :4].tolist()],
    ]


def test_step_beyond_the_capacity_is_refused_and_runs_nothing(session):
    cache, step, _ = started(session, [TOKENS[:4]], capacity=5)
    step.run(np.array([5]))
    with pytest.raises(CacheFullError):
        step.run(np.array([5]))
    assert cache.length == 5


def test_step_behind_somebody_elses_run_is_refused(session):
    cache, step, _ = started(session, [TOKENS[:4]])
    session.run(cache, [[5]])
    with pytest.raises(ValueError, match="5 tokens, and 4 when"):
        step.run([5])
    cache.rewind(3)
    with pytest.raises(ValueError, match="3 tokens, and 4 when"):
        step.run([5])


def run_other_tokens(session, cache):
    session.run(cache, [[1, 2, 3]])
    cache.rewind(4)


def run_the_last_token_again(session, cache):
    cache.rewind(3)
    session.run(cache, [[9]])


def fail_to_run(session, cache):
    with pytest.raises(KvconvError, match="ONNX Runtime failed"):
        session.run(cache, [[1]], position_ids=[[MAX_SEQUENCE_LENGTH]])


def make_another_step(session, cache):
    mask = np.ones((1, cache.capacity), np.int64)
    session.decode_step(cache, mask, np.zeros((1, 1, VOCAB_SIZE), np.float32))


@pytest.mark.parametrize("session", ["standard", "flash"], indirect=True)  # gqa: no such failure
@pytest.mark.parametrize(
    "meanwhile", [run_other_tokens, run_the_last_token_again, fail_to_run, make_another_step]
)
def test_step_is_refused_though_the_cache_is_as_long_as_before(session, meanwhile):
    cache, step, _ = started(session, [TOKENS[:4]])
    meanwhile(session, cache)
    assert cache.length == 4
    with pytest.raises(ValueError, match="something else"):
        step.run([5])
    assert cache.length == 4


@pytest.mark.parametrize("session", ["standard", "flash"], indirect=True)  # gqa takes ones only
def test_steps_count_positions_as_a_run_does(session):
    mask = np.ones((1, 16), np.int64)
    mask[0, [0, 5]] = 0, 0  # one slot of the prompt, and one of the steps
    mask[0, 2] = 2
    stepped, ran = session.new_cache(1, 16), session.new_cache(1, 16)
    logits = session.run(stepped, [TOKENS[:4]], attention_mask=mask[:, :4])
    session.run(ran, [TOKENS[:4]], attention_mask=mask[:, :4])
    step = session.decode_step(stepped, mask, logits)
    for end in range(5, 9):
        step.run(TOKENS[end - 1 : end])
        expected = session.run(ran, [TOKENS[end - 1 : end]], attention_mask=mask[:, :end])
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([5], "1 token_ids; the cache has 2 rows"),
        ([5, 6, 7], "3 token_ids; the cache has 2 rows"),
        ([5, -1], "holds -1; .* below vocab_size 259"),
        ([5, VOCAB_SIZE], "holds 259; .* below vocab_size 259"),
    ],
    ids=str,
)
def test_wrong_ids_are_refused_before_anything_runs(session, token_ids, message):
    prompts = [TOKENS[:4], TOKENS[4:8]]
    cache, step, logits = started(session, prompts)
    with pytest.raises(ValueError, match=message):
        step.run(token_ids)
    assert cache.length == 4
    step.run([8, 9])
    for row, prompt in enumerate(prompts):
        expected = DECODER.reference([*prompt, 8 + row])[-1]
        assert np.abs(logits[row, 0] - expected).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("mask", "logits", "message"),
    [
        (np.ones((1, 15)), np.zeros((1, 1, VOCAB_SIZE), np.float32), r"mask is float64; .* integ"),
        (np.ones((1, 15), int), np.zeros((1, 1, VOCAB_SIZE), np.float32), r"\(1, 15\).*\(1, 16\)"),
        (np.ones((1, 16), int), np.zeros((1, 2, VOCAB_SIZE), np.float32), "logits is float32"),
        (np.ones((1, 16), int), np.zeros((1, 1, VOCAB_SIZE)), "logits is float64"),
        (
            np.ones((1, 16), int),
            np.zeros((1, 1, 2 * VOCAB_SIZE), np.float32)[..., ::2],
            "not contiguous; it must be",
        ),
    ],
    ids=["fractions", "narrow", "two logits", "float64", "not contiguous"],
)
def test_wrong_arrays_are_refused_before_a_step_is_made(session, mask, logits, message):
    cache = session.new_cache(1, 16)
    session.run(cache, [TOKENS[:4]])
    with pytest.raises((TypeError, ValueError), match=message):
        session.decode_step(cache, mask, logits)


@pytest.mark.parametrize("session", ["gqa"], indirect=True)
@pytest.mark.parametrize("slot", [1, 9], ids=["cached", "to come"])
def test_mask_that_the_flavour_does_not_take_is_refused(session, slot):
    cache = session.new_cache(1, 16)
    logits = session.run(cache, [TOKENS[:4]])
    mask = np.ones((1, 16), np.int64)
    mask[0, slot] = 0
    with pytest.raises(FlavourError, match=f"0 in row 0, slot {slot}"):
        session.decode_step(cache, mask, logits)
