"""The generator over a session that computes the next token from the tokens it was fed.

A batch can only equal single runs if tokens, mask and padding are right. Two tests at the end run a
real tiny bundle.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from kvconv.errors import CacheFullError, PromptError
from kvconv.runtime import Generator, SamplingParams
from kvconv.runtime.generator import GREEDY
from scripted_session import MANIFEST, TOKENIZER, ScriptedSession, collect, hashed
from tiny_bundle import BOS, EOS, VOCAB_SIZE, TinyDecoder, write_bundle


def spell(text: str, prompt_length: int) -> Callable[[list[int]], int]:
    """Script an answer byte by byte, then EOS."""
    answer = [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    return lambda seen: answer[min(len(seen) - prompt_length, len(answer) - 1)]


def scripted(script, **options) -> Generator:
    return Generator(ScriptedSession(script), TOKENIZER, **options)


def test_answer_streams_and_ends_at_eos():
    generator = scripted(spell("Paris, été 🗼.", 3))
    ids, texts, reasons = collect(generator, [[BOS, 65, 66]])
    assert texts == ["Paris, été 🗼."]
    assert reasons == ["eos"]
    assert ids[0][-1] == EOS
    assert TOKENIZER.detokenize(ids[0]) == texts[0]


def test_pieces_hold_whole_characters():
    generator = scripted(spell("aé🗼", 1))
    pieces = [event.text for event in generator.generate([[65]])]
    assert pieces == ["a", "", "é", "", "", "", "🗼", ""]


def test_any_of_several_eos_ids_ends():
    manifest = dataclasses.replace(MANIFEST, eos_token_ids=(7, EOS))
    generator = Generator(ScriptedSession(lambda seen: 7, manifest), TOKENIZER)
    assert collect(generator, [[1]]) == ([[7]], [""], ["eos"])


def test_max_new_tokens_ends_with_length_and_flushes_half_a_character():
    generator = scripted(spell("aé", 1))
    ids, texts, reasons = collect(generator, [[65]], SamplingParams(max_new_tokens=2))
    assert len(ids[0]) == 2
    assert texts == ["a\ufffd"]
    assert reasons == ["length"]


def test_stop_string_is_cut_and_never_shown_in_part():
    generator = scripted(spell("one STOP two", 1))
    events = list(generator.generate([[65]], SamplingParams(stop=("STOP",))))
    assert "".join(event.text for event in events) == "one "
    assert all("S" not in event.text for event in events)
    assert events[-1].finish_reason == "stop"
    assert len(events) == len("one STOP")


def test_beginning_of_a_stop_string_is_shown_at_the_end():
    _, texts, reasons = collect(
        scripted(spell("one ST", 1)), [[65]], SamplingParams(stop=("STOP",))
    )
    assert (texts, reasons) == (["one ST"], ["eos"])


def test_batch_equals_single_runs():
    prompts = [[BOS, *range(n, n * 7 % 250)] for n in (3, 40, 11, 1)]
    generator = scripted(hashed)
    params = SamplingParams(max_new_tokens=60)
    together = collect(generator, prompts, params)
    alone = [collect(generator, [prompt], params) for prompt in prompts]
    assert together == tuple([row[part][0] for row in alone] for part in range(3))
    assert {len(ids) for ids in together[0]} != {60}, "rows should end at different steps"


PARAMS_PER_ROW = (
    SamplingParams(temperature=3.0, seed=5, max_new_tokens=20, repetition_penalty=1.1),
    SamplingParams(max_new_tokens=7),
    SamplingParams(temperature=3.0, seed=5, max_new_tokens=40, top_k=9),
    SamplingParams(temperature=2.0, seed=6, stop=("a", "e", "\ufffd"), max_new_tokens=60),
)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)], ids=str)
def test_batch_of_different_params_equals_single_runs_in_any_place(order):
    prompts = [[BOS, 1, 2, 3], [BOS, 9], [BOS, 1, 2, 3], [7] * 30]
    generator = scripted(hashed)
    together = collect(generator, [prompts[i] for i in order], [PARAMS_PER_ROW[i] for i in order])
    alone = [collect(generator, [prompts[i]], PARAMS_PER_ROW[i]) for i in order]
    assert together == tuple([row[part][0] for row in alone] for part in range(3))
    assert len({len(ids) for ids in together[0]}) == 4, "rows should end at different steps"


def test_one_seed_gives_equal_prompts_equal_draws_and_no_seed_different_ones():
    generator = scripted(hashed)

    def draws(seed):
        params = SamplingParams(temperature=9.0, seed=seed, max_new_tokens=20)
        return collect(generator, [[BOS, 1, 2]] * 2, params)[0]

    assert draws(5)[0] == draws(5)[1]
    assert draws(None)[0] != draws(None)[1]


def test_params_of_another_number_than_the_prompts_are_refused():
    with pytest.raises(ValueError, match="1 params for 2 prompts"):
        scripted(hashed).generate([[1], [2]], [GREEDY])


def test_check_refuses_what_generate_refuses_and_runs_nothing():
    generator = scripted(hashed, max_sequence_length=12)
    generator.check([[1] * 11, [2]], [GREEDY, SamplingParams(max_new_tokens=1)])
    with pytest.raises(CacheFullError):
        generator.check([[1] * 12, [2]])
    with pytest.raises(PromptError):
        generator.check([[1], []])
    assert generator.session.run_lengths == []


def test_long_prompt_runs_in_chunks():
    generator = scripted(hashed)
    prompt = [i % 250 for i in range(1100)]
    ids, _, _ = collect(generator, [prompt], SamplingParams(max_new_tokens=2))
    assert generator.session.run_lengths == [512, 512, 76, 1]
    assert ids[0][0] == hashed(prompt)


@pytest.mark.parametrize("prefill_chunk", [1, 4, 100])
def test_prefill_in_any_chunks_feeds_the_same_tokens(prefill_chunk):
    generator = scripted(hashed)
    cache = generator.session.new_cache(1, 16)
    logits = generator.prefill(cache, np.array([[5, 6, 7, 8, 9]]), prefill_chunk=prefill_chunk)
    assert logits[0, -1].argmax() == hashed([5, 6, 7, 8, 9])
    logits = generator.session.run(cache, np.array([[10]]))
    assert logits[0, -1].argmax() == hashed([5, 6, 7, 8, 9, 10])
    assert cache.length == 6


def test_prefill_takes_the_generators_chunks_and_at_least_one_token():
    generator = scripted(hashed, prefill_chunk=3)
    collect(generator, [[5, 6, 7, 8, 9, 1, 2]], SamplingParams(max_new_tokens=1))
    assert generator.session.run_lengths == [3, 3, 1]
    with pytest.raises(ValueError, match="prefill_chunk is 0"):
        scripted(hashed, prefill_chunk=0)


@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_logits_of_chunks_equal_those_of_the_whole(tmp_path, attention):
    generator = Generator.open(
        write_bundle(tmp_path / "bundle", attention=attention), threads=1, prefill_chunk=4
    )
    ids = np.arange(26).reshape(2, 13)
    mask = np.ones((2, 13), np.int64)
    mask[1, :5] = 0
    logits = [
        generator.prefill(generator.session.new_cache(2, 16), ids, mask, prefill_chunk=chunk)
        for chunk in (13, None, 1)
    ]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
    np.testing.assert_allclose(logits[2], logits[0], atol=1e-4)


def test_prefill_beyond_capacity_runs_nothing():
    generator = scripted(hashed)
    cache = generator.session.new_cache(1, 4)
    with pytest.raises(CacheFullError):
        generator.prefill(cache, np.array([[5, 6, 7, 8, 9]]), prefill_chunk=2)
    assert generator.session.run_lengths == []


def test_prefill_of_nothing_is_refused(tmp_path):
    generator = Generator.open(write_bundle(tmp_path / "bundle"), threads=1)
    cache = generator.session.new_cache(1, 4)
    out = np.zeros((1, 1, VOCAB_SIZE), np.float32)
    with pytest.raises(ValueError, match="input_ids"):
        generator.prefill(cache, np.zeros((1, 0), np.int64), out=out)


def test_model_with_a_pad_token_id_of_minus_one_runs_batches():
    manifest = dataclasses.replace(MANIFEST, pad_token_id=-1)
    session = ScriptedSession(hashed, manifest)
    cache = session.new_cache(2, 20)
    collect(Generator(session, TOKENIZER), [[5, 6, 7], [8]], cache=cache)
    assert cache.tokens.min() >= 0


def test_cache_is_as_large_as_needed():
    generator = scripted(hashed, max_sequence_length=50)
    assert generator.new_cache([[1] * 10], SamplingParams(max_new_tokens=20)).capacity == 30
    assert (
        generator.new_cache([[1] * 10, [1] * 12], SamplingParams(max_new_tokens=20)).capacity == 32
    )
    assert generator.new_cache([[1] * 10], SamplingParams(max_new_tokens=200)).capacity == 50
    per_row = [SamplingParams(max_new_tokens=5), SamplingParams(max_new_tokens=7)]
    assert generator.new_cache([[1] * 10, [1] * 12], per_row).capacity == 19


def test_generation_stops_at_capacity_with_length():
    generator = scripted(lambda seen: 65, max_sequence_length=12)
    ids, _, reasons = collect(generator, [[1] * 9])
    assert (len(ids[0]), reasons) == (3, ["length"])


@pytest.mark.parametrize("length", [12, 13, 40])
def test_prompt_that_leaves_no_room_is_refused(length):
    generator = scripted(hashed, max_sequence_length=12)
    with pytest.raises(CacheFullError, match="--max-sequence-length") as caught:
        generator.generate([[1] * length])
    assert (caught.value.needed, caught.value.capacity) == (length + 1, 12)
    assert generator.session.run_lengths == []


def test_more_than_the_model_holds_is_refused():
    with pytest.raises(CacheFullError) as caught:
        scripted(hashed, max_sequence_length=2001)
    assert (caught.value.needed, caught.value.capacity) == (2001, 2000)


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]], ids=str)
def test_empty_prompt_is_refused(prompts):
    with pytest.raises(PromptError, match="empty"):
        scripted(hashed).generate(prompts)


def test_given_cache_is_used_and_keeps_all_tokens_but_the_last():
    generator = scripted(spell("hi", 2))
    cache = generator.session.new_cache(1, 32)
    collect(generator, [[65, 66]], cache=cache)
    assert cache.length == 2 + 3 - 1


@pytest.mark.parametrize(
    ("batch_size", "length", "prompts"),
    [(2, 0, [[1]]), (1, 1, [[1]]), (1, 3, [[1, 2]]), (2, 1, [[1, 2], [1, 2]])],
    ids=["rows", "whole prompt", "more than the prompt", "batch"],
)
def test_given_cache_that_does_not_suit_is_refused(batch_size, length, prompts):
    generator = scripted(hashed)
    cache = generator.session.new_cache(batch_size, 32)
    cache.commit_run(length)
    with pytest.raises(ValueError, match="cache holds"):
        generator.generate(prompts, cache=cache)


@pytest.mark.parametrize("cached", [1, 4, 5])
def test_cached_beginning_of_a_prompt_is_not_run_again(cached):
    prompt = [BOS, 5, 6, 7, 8, 9]
    generator = scripted(hashed)
    params = SamplingParams(max_new_tokens=20, repetition_penalty=1.3)
    expected = collect(generator, [prompt], params)
    generator.session.run_lengths.clear()
    cache = generator.session.new_cache(1, 40)
    generator.prefill(cache, np.array([prompt[:cached]]))
    assert collect(generator, [prompt], params, cache=cache) == expected
    assert generator.session.run_lengths[:2] == [cached, 6 - cached]


def test_stream_of_a_real_bundle_equals_the_reference(tmp_path):
    decoder = TinyDecoder(seed=1)
    generator = Generator.open(write_bundle(tmp_path / "bundle", decoder=decoder), threads=1)
    tokens = generator.encode("Hello", chat_template=True)
    assert TOKENIZER.detokenize(tokens) == "[user] Hello\n[assistant] "
    assert tokens[:2] != [BOS, BOS]
    expected = []
    while len(expected) < 12 and EOS not in expected:
        expected.append(int(decoder.reference(tokens + expected)[-1].argmax()))
    params = SamplingParams(max_new_tokens=12)
    assert collect(generator, [tokens], params)[0] == [expected]
    streamed = "".join(generator.stream("Hello", params, chat_template=True))
    assert streamed == TOKENIZER.detokenize(expected)


def test_real_batch_equals_single_runs(tmp_path):
    generator = Generator.open(write_bundle(tmp_path / "bundle"), threads=1)
    prompts = [generator.encode(text) for text in ("a", "some words", "été", "1234567")]
    params = SamplingParams(max_new_tokens=20)
    together = collect(generator, prompts, params)
    alone = [collect(generator, [prompt], params) for prompt in prompts]
    assert together == tuple([row[part][0] for row in alone] for part in range(3))
