"""The gqa flavour in the runtime: right where it runs, refused before it runs where it does not."""

import numpy as np
import onnxruntime
import pytest

from kvconv.errors import FlavourError, ProviderError
from kvconv.flavour import FLAVOURS
from kvconv.runtime import Bundle, Generator, SamplingParams, Session, cuda
from kvconv.runtime.kv_cache import SharedBufferCache
from tiny_bundle import TinyDecoder, write_bundle

TOLERANCE = 1e-4
DECODER = TinyDecoder(seed=3)
TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33]
OTHERS = TOKENS[::-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("gqa"), decoder=DECODER, attention="gqa")


@pytest.fixture(scope="module")
def session(folder) -> Session:
    return Session(Bundle.open(folder), threads=1)


@pytest.fixture(scope="module")
def generator(folder) -> Generator:
    return Generator.open(folder, threads=1)


def assert_close(found, expected):
    assert np.abs(found - expected).max() <= TOLERANCE


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 4, 3], [1, 11], [11, 1]], ids=str)
def test_pieces_of_one_sequence_equal_the_reference(session, pieces):
    cache, start = session.new_cache(1, 12), 0
    assert isinstance(cache, SharedBufferCache)
    for size in pieces:
        logits = session.run(cache, [TOKENS[start : start + size]], num_logits_to_keep=0)
        assert_close(logits[0], DECODER.reference(TOKENS)[start : start + size])
        start += size


def test_batch_of_equal_lengths_equals_the_reference(session):
    cache = session.new_cache(2, 16)
    runs = [session.run(cache, [TOKENS[:9], OTHERS[:9]], num_logits_to_keep=0)]
    runs += [session.run(cache, [[TOKENS[i]], [OTHERS[i]]]) for i in (9, 10, 11)]
    for row, tokens in zip(np.concatenate(runs, axis=1), (TOKENS, OTHERS), strict=True):
        assert_close(row, DECODER.reference(tokens))


def test_rewind_and_fork_keep_the_tokens_before(session):
    cache = session.new_cache(1, 32)
    session.run(cache, [TOKENS])
    fork = cache.fork()
    cache.rewind(5)
    for each, before in ((cache, TOKENS[:5]), (fork, TOKENS)):
        logits = session.run(each, [[1, 2, 3]])
        assert_close(logits[0, -1], DECODER.reference([*before, 1, 2, 3])[-1])


@pytest.mark.parametrize("value", [0, 2])
@pytest.mark.parametrize(("row", "slot"), [(0, 0), (1, 3), (1, 5)], ids=["left", "hole", "right"])
def test_mask_that_is_not_ones_is_refused(session, row, slot, value):
    cache = session.new_cache(2, 16)
    mask = np.ones((2, 6), np.int64)
    mask[row, slot] = value
    message = (
        f"gqa flavour .* attention_mask is {value} in row {row}, slot {slot}.*--batch-size 1.*flash"
    )
    with pytest.raises(FlavourError, match=message) as caught:
        session.run(cache, [TOKENS[:6], OTHERS[:6]], attention_mask=mask)
    assert caught.value.attention == "gqa"
    assert cache.length == 0


def test_positions_that_are_not_slots_are_refused(session):
    cache = session.new_cache(1, 16)
    session.run(cache, [TOKENS[:4]], position_ids=[[0, 1, 2, 3]])
    with pytest.raises(FlavourError, match="position_ids is 9 in row 0, slot 5"):
        session.run(cache, [[1, 2]], position_ids=[[4, 9]])
    assert cache.length == 4


def test_several_tokens_behind_a_past_are_refused_in_a_batch_only(session):
    cache = session.new_cache(2, 16)
    session.run(cache, [TOKENS[:4], OTHERS[:4]])
    with pytest.raises(FlavourError, match="here 3 follow 4 at batch size 2.*--attention flash"):
        session.run(cache, [[1, 2, 3]] * 2)
    assert cache.length == 4
    assert_close(session.run(cache, [[1], [2]])[1, -1], DECODER.reference([*OTHERS[:4], 2])[-1])


def test_prompts_of_unequal_lengths_are_refused_before_the_first_event(generator):
    with pytest.raises(FlavourError, match="gqa flavour .* these have 4 to 12 tokens.*one by one"):
        generator.generate([TOKENS, TOKENS[:4]])


def test_batch_generates_what_single_prompts_do(generator):
    params = SamplingParams(max_new_tokens=6)
    events = list(generator.generate([TOKENS, OTHERS], params))
    for row, prompt in enumerate((TOKENS, OTHERS)):
        alone = [event.token_id for event in generator.generate([prompt], params)]
        assert [event.token_id for event in events if event.row == row] == alone


def test_prefill_of_a_batch_is_one_run_where_chunks_are_not_taken(generator):
    tokens = np.array([TOKENS, OTHERS])
    logits = generator.prefill(generator.session.new_cache(2, 16), tokens)
    for row, prompt in enumerate((TOKENS, OTHERS)):
        assert_close(logits[row, -1], DECODER.reference(prompt)[-1])


def test_chunks_that_a_batch_does_not_take_are_refused_before_anything_runs(folder):
    generator = Generator.open(folder, threads=1, prefill_chunk=5)
    cache = generator.session.new_cache(2, 16)
    words = "chunks of 5 would cut 12 tokens at batch size 2.*--prefill-chunk"
    with pytest.raises(FlavourError, match=words):
        generator.check([TOKENS, OTHERS])
    with pytest.raises(FlavourError, match=words):
        generator.generate([TOKENS, OTHERS], cache=cache)
    with pytest.raises(FlavourError, match="chunks of 4 would cut 12"):
        generator.prefill(cache, np.array([TOKENS, OTHERS]), prefill_chunk=4)
    assert cache.length == 0
    generator.check([TOKENS])  # one row takes them
    generator.check([TOKENS[:5], OTHERS[:5]])  # one chunk holds these


def test_cuda_is_refused(folder, monkeypatch):
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: both)
    monkeypatch.setattr(cuda, "why_unavailable", lambda: None)
    with pytest.raises(ProviderError, match="has no CUDA kernels"):
        Session(Bundle.open(folder), provider="cuda")


def test_other_flavours_take_padding_and_batched_chunks():
    assert all(f.padding and f.batched_chunks for name, f in FLAVOURS.items() if name != "gqa")
