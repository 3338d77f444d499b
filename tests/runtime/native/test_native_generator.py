"""The native generator against the Python one, token for token, over every kind of cache."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvconv.runtime import Generator, SamplingParams
from kvconv_c import Library, Model, NativeError
from tiny_bundle import VOCAB_SIZE, TinyDecoder, write_bundle
from tiny_decoders import WINDOW

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111]
CACHES = [
    ("flash", "float32"),
    ("flash", "float16"),
    ("flash", "bfloat16"),
    ("flash", "int8"),
    ("flash", "int4"),
    ("standard", "float32"),
    ("gqa", "float32"),
]
PARAMS = [
    SamplingParams(max_new_tokens=30),
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=0),
    SamplingParams(max_new_tokens=30, temperature=8.0, seed=1),
    SamplingParams(max_new_tokens=30, temperature=5.0, seed=2**64 - 1, top_k=20),
    SamplingParams(max_new_tokens=30, temperature=5.0, seed=3, top_p=0.7),
    SamplingParams(max_new_tokens=30, temperature=5.0, seed=4, min_p=0.05),
    SamplingParams(max_new_tokens=30, repetition_penalty=1.5),
    SamplingParams(
        max_new_tokens=30,
        temperature=6.0,
        seed=5,
        top_k=60,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
    ),
]


class Pair:
    """One bundle in both runtimes."""

    def __init__(self, library: Library, bundle: Path, **options: int) -> None:
        self.bundle = bundle
        self.python = Generator.open(bundle, threads=1, **options)
        self.native: Model = library.open(bundle, threads=1)

    def python_ids(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return [event.token_id for event in self.python.generate([prompt], params)]

    def native_ids(self, prompt: list[int], params: SamplingParams) -> list[int]:
        generator = self.native.generator(
            min(len(prompt) + params.max_new_tokens, self.python.max_sequence_length)
        )
        generator.append(prompt)
        return generator.generate(params.max_new_tokens, params)


@pytest.fixture(scope="module", params=CACHES, ids="-".join)
def pair(request, library, tmp_path_factory) -> Pair:
    attention, dtype = request.param
    folder = tmp_path_factory.mktemp("bundles") / "über allem"
    write_bundle(folder, decoder=TinyDecoder(3), attention=attention, cache_dtype=dtype)
    return Pair(library, folder)


@pytest.fixture(scope="module")
def flash(library, tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("flash") / "bundle"
    return Pair(library, write_bundle(folder, decoder=TinyDecoder(3), attention="flash"))


@pytest.fixture(scope="module")
def ring(library, made_once: Callable[..., Path], checkpoint: Callable[..., Path]) -> Pair:
    from kvconv.converter import ExportOptions, export

    def fill(folder: Path) -> None:  # as in runtime/test_rings.py, which shares it
        model = str(checkpoint("gemma3_text", max_position_embeddings=2000))
        export(model, folder / "ring")
        export(model, folder / "whole", ExportOptions(ring=False))

    return Pair(library, made_once("rings", fill) / "ring")


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_tokens_equal_those_of_the_python_runtime(pair, params):
    expected = pair.python_ids(PROMPT, params)
    assert pair.native_ids(PROMPT, params) == expected
    assert len(set(expected)) > 1


def test_logits_of_chunks_steps_forks_and_rewinds_equal_one_run(pair):
    whole = pair.native.generator(40)
    whole.append(PROMPT)
    expected = whole.logits()
    np.testing.assert_allclose(
        expected,
        pair.python.session.run(pair.python.session.new_cache(1, 40), [PROMPT])[0, 0],
        atol=1e-5,
    )
    tolerance = 1e-4 if "int" not in pair.bundle.parent.name else 1.0
    chunked = pair.native.generator(40, prefill_chunk=3)
    chunked.append(PROMPT)
    stepped = pair.native.generator(40)
    for token in PROMPT:
        stepped.append([token])
    rewound = pair.native.generator(40)
    rewound.append([*PROMPT[:5], 1, 2, 3, 4])
    rewound.rewind(5)
    rewound.append(PROMPT[5:])
    taken_back = pair.native.generator(40)
    taken_back.append([*PROMPT, 7])
    taken_back.rewind(len(PROMPT))  # the last token that stays runs again
    copied = whole.fork()
    whole.append([1, 2, 3])
    for generator in (chunked, stepped, rewound, taken_back, copied):
        assert generator.tokens == PROMPT
        np.testing.assert_allclose(generator.logits(), expected, atol=tolerance)


def test_fork_goes_on_by_itself_with_the_same_random_state(flash):
    params = SamplingParams(temperature=5.0)
    generator = flash.native.generator(40)
    generator.call("seed", 11)
    generator.append(PROMPT)
    generator.next(params)
    copy = generator.fork()
    ids = [generator.next(params)[0] for _ in range(10)]
    assert [copy.next(params)[0] for _ in range(10)] == ids
    assert copy.tokens == generator.tokens


def test_unseeded_generators_draw_differently(flash):
    params = SamplingParams(max_new_tokens=30, temperature=9.0)
    assert flash.native_ids(PROMPT, params) != flash.native_ids(PROMPT, params)


def test_eos_ends_a_text_and_is_not_run(library, tmp_path):
    likely = Pair(library, write_bundle(tmp_path / "a", decoder=TinyDecoder(3), attention="flash"))
    ids = likely.native_ids(PROMPT, SamplingParams(max_new_tokens=20))
    eos = ids[4]
    folder = write_bundle(
        tmp_path / "b", decoder=TinyDecoder(3), attention="flash", eos_token_ids=(eos,)
    )
    generator = library.open(folder, threads=1).generator(40)
    generator.append(PROMPT)
    found = [generator.next() for _ in range(ids.index(eos) + 1)]
    assert [finish for _, finish in found] == [None] * ids.index(eos) + ["eos"]
    assert generator.stats.cached == generator.stats.length - 1
    generator.append([1])  # going on runs it
    assert generator.stats.cached == generator.stats.length


def test_full_cache_ends_a_text_then_refuses_and_keeps_what_it_has(flash):
    generator = flash.native.generator(len(PROMPT) + 3)
    generator.append(PROMPT)
    assert [generator.next()[1] for _ in range(3)] == [None, None, "length"]
    tokens = generator.tokens
    for refused in (generator.next, lambda: generator.append([1])):
        with pytest.raises(NativeError, match="11") as caught:
            refused()
        assert caught.value.code == "CACHE_FULL"
    assert generator.tokens == tokens
    generator.rewind(len(PROMPT))
    assert [generator.next()[0] for _ in range(3)] == tokens[len(PROMPT) :]


def test_stats_count_tokens_bytes_and_time(flash):
    generator = flash.native.generator(32)
    cache = flash.python.session.new_cache(1, 32)
    assert generator.stats.cache_bytes == cache.nbytes
    generator.append(PROMPT)
    for _ in range(4):
        generator.next()
    stats = generator.stats
    assert (stats.prefill_tokens, stats.decode_tokens) == (len(PROMPT), 3)
    assert (stats.length, stats.cached, stats.capacity) == (len(PROMPT) + 4, len(PROMPT) + 3, 32)
    assert 0 < stats.onnxruntime_ns <= stats.prefill_ns + stats.decode_ns


def test_rings_wrap_as_in_python(ring):
    prompt = np.random.default_rng(5).integers(0, VOCAB_SIZE - 4, 600).tolist()
    params = SamplingParams(max_new_tokens=300, temperature=1.0, seed=9)
    assert ring.native_ids(prompt, params) == ring.python_ids(prompt, params)


def test_rings_refuse_rewinds_and_chunks_that_python_refuses(ring):
    generator = ring.native.generator(1000)
    generator.append(list(range(200)) * 4)
    shortest = generator.stats.shortest_rewind
    assert shortest == 800 - 256  # one behind Python's: the last token runs again
    with pytest.raises(NativeError, match=f"Rewind to {shortest} or more") as caught:
        generator.rewind(shortest - 1)
    assert caught.value.code == "REWIND_ERROR"
    assert generator.stats.length == 800
    generator.rewind(shortest)
    logits = generator.logits()
    whole = ring.native.generator(1000)
    whole.append((list(range(200)) * 4)[:shortest])
    np.testing.assert_allclose(logits, whole.logits(), atol=1e-4)
    generator.rewind(0)
    generator.append([1, 2, 3])
    with pytest.raises(NativeError, match="at most 256") as caught:
        ring.native.generator(1000, prefill_chunk=257)
    assert caught.value.code == "CACHE_FULL"
    assert ring.native.info.max_prefill_chunk == 256
    assert WINDOW < 256


def test_generators_in_threads_give_what_they_give_alone(flash):
    params = [SamplingParams(max_new_tokens=40, temperature=3.0, seed=seed) for seed in range(4)]
    alone = [flash.native_ids(PROMPT, each) for each in params]
    together: list[list[int]] = [[] for _ in params]

    def serve(index: int) -> None:
        together[index] = flash.native_ids(PROMPT, params[index])

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(len(params))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
