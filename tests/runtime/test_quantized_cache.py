"""Quantised and narrow caches under a session: what they hold, however it was run.

The weights are few bits wide, so that sums of products are exact whatever their order: then what is
stored must have the same bytes however the tokens came.
"""

import numpy as np
import numpy.typing as npt
import pytest

from kvconv.errors import CacheFullError
from kvconv.plan import kv_cache_bytes
from kvconv.runtime import Bundle, Conversation, Generator, KVCache, SamplingParams, Session
from kvconv.runtime.kv_cache import ConcatCache
from quantized_rows import dequantize, transform
from tiny_bundle import HEAD_DIM, PAD, TinyDecoder, cache_layer, letter_decoder, write_bundle

TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33]
DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
ERRORS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15, "int8": 0.5, "int4": 4.0}
"""Largest difference of a logit from the reference; the logits themselves reach 30."""


def coarse_decoder() -> TinyDecoder:
    """Return a decoder whose weights are multiples of 1/16."""
    decoder = TinyDecoder(seed=3)
    decoder.weights = {name: np.round(16 * w) / 16 for name, w in decoder.weights.items()}
    return decoder


DECODER = coarse_decoder()


@pytest.fixture(scope="module", params=DTYPES)
def session(request, tmp_path_factory) -> Session:
    folder = tmp_path_factory.mktemp("bundles") / request.param
    write_bundle(folder, decoder=DECODER, attention="flash", cache_dtype=request.param)
    return Session(Bundle.open(folder), threads=1)


def prefill(session: Session, chunks: list[int], *, cache: KVCache | None = None) -> npt.NDArray:
    """Run TOKENS in chunks; return the logits of the last one."""
    cache = cache or session.new_cache(1, 32)
    for start, size in zip(np.cumsum([0, *chunks]), chunks, strict=False):
        logits = session.run(cache, [TOKENS[start : start + size]])
    return logits


def content(cache: KVCache, row: int = 0, start: int = 0) -> list[npt.NDArray]:
    """Return a copy of what a row holds from a slot on, as bytes."""
    tensors = cache._pasts if isinstance(cache, ConcatCache) else cache._tensors
    used = (tensor.array[row, :, start : cache.length] for tensor in tensors)
    return [np.ascontiguousarray(array).view(np.uint8).copy() for array in used]


def assert_same_bytes(found: list[npt.NDArray], expected: list[npt.NDArray]) -> None:
    for i, (tensor, wanted) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(tensor, wanted, err_msg=f"tensor {i}")


def test_logits_stay_close_to_the_reference(session):
    dtype = session.manifest.cache_layers[0].dtype
    logits = session.run(session.new_cache(1, 32), [TOKENS], num_logits_to_keep=0)[0]
    error = np.abs(logits - DECODER.reference(TOKENS)).max()
    is_exact = dtype in ("float32", "float16")  # which has room for these keys and values
    assert (0 if is_exact else 1e-4) < error < ERRORS[dtype]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_stored_bytes_read_back_as_keys_and_values(tmp_path, dtype):
    tensors = {}
    for stored in (dtype, "float32"):
        write_bundle(tmp_path / stored, decoder=DECODER, attention="flash", cache_dtype=stored)
        session = Session(Bundle.open(tmp_path / stored), threads=1)
        cache = session.new_cache(1, len(TOKENS))
        session.run(cache, [TOKENS])
        tensors[stored] = [tensor.array for tensor in cache._tensors]
    key, value, key_scale, value_scale = tensors[dtype]
    steps = {"int8": (1 / 127, 1 / 127), "int4": (1 / 16, 1 / 8)}[dtype]
    kinds = {"int8": ("int8", "int8"), "int4": ("int5", "int4")}[dtype]
    stored = zip(kinds, (key, value), (key_scale, value_scale), steps, strict=True)
    for (kind, codes, scale, step), wanted in zip(stored, tensors["float32"], strict=True):
        found = transform(dequantize(codes, scale, kind, HEAD_DIM))
        # The rotation keeps lengths: half a step in each of the numbers, bfloat16 scales on top;
        # the other end of a signed range of codes is one step short.
        largest = np.abs(wanted).sum(axis=-1) / np.sqrt(HEAD_DIM)
        bound = 1.02 * step * largest * np.sqrt(HEAD_DIM)
        error = np.linalg.norm(found - wanted, axis=-1)
        assert (error > 0).all()
        assert (error < bound).all()


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 4, 3], [11, 1]], ids=str)
def test_chunks_and_steps_store_the_same_bytes_as_one_run(session, chunks):
    caches = [session.new_cache(1, 32) for _ in range(2)]
    whole = prefill(session, [len(TOKENS)], cache=caches[0])
    np.testing.assert_allclose(prefill(session, chunks, cache=caches[1]), whole, atol=1e-4)
    assert_same_bytes(content(caches[1]), content(caches[0]))


def test_rows_of_a_left_padded_batch_equal_single_runs(session):
    prompts = [TOKENS, TOKENS[:4], TOKENS[2:9]]
    width = max(map(len, prompts))
    ids, mask = np.full((3, width), PAD), np.zeros((3, width + 1), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    batch = session.new_cache(3, 32)
    session.run(batch, ids[:, :5], attention_mask=mask[:, :5])
    session.run(batch, ids[:, 5:], attention_mask=mask[:, :width])
    logits = session.run(batch, [[7], [8], [9]], attention_mask=mask)
    for row, prompt in enumerate(prompts):
        single = session.new_cache(1, 32)
        session.run(single, [prompt])
        expected = session.run(single, [[7 + row]])
        np.testing.assert_allclose(logits[row], expected[0], atol=1e-4, err_msg=f"row {row}")
        assert_same_bytes(content(batch, row, start=width - len(prompt)), content(single))


def test_rewound_and_forked_caches_go_on_as_if_nothing_had_been(session):
    expected = session.new_cache(1, 32)
    wanted = prefill(session, [len(TOKENS)], cache=expected)
    cache = session.new_cache(1, 32)
    session.run(cache, [[*TOKENS[:6], 1, 2, 3]])
    cache.rewind(6)
    fork = cache.fork()
    session.run(cache, [[4, 5, 6, 7]])
    logits = session.run(fork, [TOKENS[6:]])
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    assert_same_bytes(content(fork), content(expected))
    cache.reset()
    np.testing.assert_allclose(prefill(session, [12], cache=cache), wanted, atol=1e-4)
    assert_same_bytes(content(cache), content(expected))


def test_full_cache_refuses_another_token_and_keeps_its_bytes(session):
    cache = session.new_cache(1, len(TOKENS))
    session.run(cache, [TOKENS])
    before = content(cache)
    with pytest.raises(CacheFullError, match="needs 13 cache slots"):
        session.run(cache, [[1]])
    assert_same_bytes(content(cache), before)


@pytest.mark.parametrize(("batch_size", "capacity"), [(1, 1), (3, 17)])
def test_buffers_take_what_the_plan_says(session, batch_size, capacity):
    layers = (cache_layer(session.manifest.cache_layers[0].dtype),)
    planned = kv_cache_bytes(layers, batch_size=batch_size, max_sequence_length=capacity)
    assert session.new_cache(batch_size, capacity).nbytes == planned


def test_concat_cache_holds_the_same_bytes_as_a_shared_buffer(session):
    """What a program gets that passes presents on as pasts."""
    shared = session.new_cache(1, 32)
    expected = prefill(session, [5, 7], cache=shared)
    layers = session.manifest.cache_layers
    concat = ConcatCache(layers, 1, 32, session._session.io_binding)
    np.testing.assert_allclose(prefill(session, [5, 7], cache=concat), expected, atol=1e-4)
    assert concat.nbytes == kv_cache_bytes(layers, batch_size=1, max_sequence_length=len(TOKENS))
    assert_same_bytes(content(concat), content(shared))
    concat.rewind(5)
    np.testing.assert_allclose(session.run(concat, [TOKENS[5:]]), expected, atol=1e-4)
    assert_same_bytes(content(concat.fork()), content(shared))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_turns_of_a_conversation_equal_fresh_prompts(tmp_path, dtype):
    write_bundle(tmp_path, decoder=letter_decoder(ends=True), attention="flash", cache_dtype=dtype)
    generator = Generator.open(tmp_path, threads=1)
    conversation = Conversation(generator)
    params = SamplingParams(max_new_tokens=5)
    for text in ("Hi", "me"):
        prompt = generator.encode_chat([*conversation.messages, {"role": "user", "content": text}])
        fresh = [event.token_id for event in generator.generate([prompt], params)]
        assert [event.token_id for event in conversation.say(text, params)] == fresh
