"""Sampling against transformers' own processors, on random and on awkward logits."""

import numpy as np
import pytest
import torch
import transformers
from transformers.generation import logits_process

from kvconv.errors import KvconvError
from kvconv.runtime.sampling import (
    Sampler,
    SamplingParams,
    make_logits_processors,
    make_token_filters,
)

PROMPT = [3, 7, 7, 1, 0, 3]


def random_logits(seed: int, size: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 4, size).astype(np.float32)


def transformers_logits(
    params: SamplingParams, token_ids: list[int], logits: np.ndarray
) -> np.ndarray:
    """Chain transformers' processors in the order its `generate` does."""
    chain = []
    if params.repetition_penalty != 1:
        chain.append(logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        chain.append(logits_process.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(logits_process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(logits_process.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(logits_process.MinPLogitsWarper(params.min_p))
    scores, ids = torch.from_numpy(logits)[None].clone(), torch.tensor([token_ids])
    for processor in chain:
        scores = processor(ids, scores)
    return scores[0].numpy()


def kvconv_logits(params: SamplingParams, token_ids: list[int], logits: np.ndarray) -> np.ndarray:
    """Return the logits after all processors, minus infinity where a filter cut."""
    for processor in make_logits_processors(params):
        before = logits.copy()
        logits_after = processor(token_ids, logits)
        assert np.array_equal(logits, before), "a processor wrote into its input"
        logits = logits_after
    ids = np.arange(logits.size)
    for keep in make_token_filters(params):
        kept = keep(logits[ids])
        assert np.all(np.diff(kept) > 0)
        ids = ids[kept]
    filtered = np.full_like(logits, -np.inf)
    filtered[ids] = logits[ids]
    return filtered


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, repetition_penalty=0.8),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=40),
        SamplingParams(temperature=1.0, top_k=1000),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.001),
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.7, top_k=50, top_p=0.95, min_p=0.02, repetition_penalty=1.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(5))
def test_processors_equal_transformers(params, seed):
    logits = random_logits(seed)
    found = kvconv_logits(params, PROMPT, logits)
    expected = transformers_logits(params, PROMPT, logits)
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-6)
    assert np.abs(kvconv_logits(params, PROMPT, logits) - logits).max() > 0 or params.top_k > 300


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.95, 0.999])
def test_top_p_on_flat_and_peaked_logits_equals_transformers(spread, top_p):
    logits = random_logits(2, 5000) * np.float32(spread / 4)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    found = np.isfinite(kvconv_logits(params, PROMPT, logits)).sum()
    expected = np.isfinite(transformers_logits(params, PROMPT, logits)).sum()
    # transformers adds up in float32: at most a few tokens at the edge of flat logits differ.
    assert abs(int(found) - int(expected)) <= 5000 * 2e-4


def test_order_equals_that_of_transformers_generate():
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.5, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.2
    )
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1,
        )
    )  # fmt: skip
    theirs = model._get_logits_processor(
        config, input_ids_seq_length=1, device="cpu", model_kwargs={}
    )
    params = SamplingParams(temperature=0.5, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.2)
    short = [type(processor).__name__.partition("Logits")[0] for processor in theirs]
    chain = [*make_logits_processors(params), *make_token_filters(params)]
    ours = [type(link).__name__ for link in chain]
    assert short == ours


def test_ties_at_the_top_k_boundary_stay_as_in_transformers():
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    params = SamplingParams(temperature=1.0, top_k=2)
    expected = transformers_logits(params, PROMPT[-1:], logits)
    assert np.array_equal(kvconv_logits(params, PROMPT[-1:], logits), expected)


def test_greedy_takes_the_first_maximum():
    sampler = Sampler(SamplingParams())
    assert sampler([0], np.array([1, 5, 5, 2], np.float32)) == 1


def test_greedy_applies_the_repetition_penalty_once_per_id():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    assert sampler([1, 1, 1], np.array([2.4, 5, 0], np.float32)) == 1
    assert sampler([1, 1, 1], np.array([2.6, 5, 0], np.float32)) == 0


def test_greedy_ignores_the_other_filters():
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.9, seed=1)
    assert make_logits_processors(params) == []
    assert make_token_filters(params) == []


def test_draws_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0))
    draws = np.bincount([sampler([0], logits) for _ in range(20_000)], minlength=4) / 20_000
    # Four standard deviations of the largest frequency are 0.014.
    np.testing.assert_allclose(draws, [0.5, 0.3, 0.15, 0.05], atol=0.015)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_draws_over_several_blocks_follow_the_distribution(size):
    logits = np.full(size, -np.inf, np.float32)
    likely = np.unique([0, size // 2, size - 1])
    logits[likely] = np.log(np.arange(1, likely.size + 1, dtype=np.float32))
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0))
    draws = np.bincount([sampler([0], logits) for _ in range(20_000)], minlength=size) / 20_000
    expected = np.arange(1, likely.size + 1) / np.arange(1, likely.size + 1).sum()
    np.testing.assert_allclose(draws[likely], expected, atol=0.015)
    assert draws[likely].sum() == 1


def test_draws_never_leave_the_filter():
    logits = random_logits(1)
    sampler = Sampler(SamplingParams(temperature=2.0, top_k=3, seed=0))
    top = set(np.argsort(logits)[-3:].tolist())
    assert {sampler([0], logits) for _ in range(300)} == top


def test_seed_repeats_the_draws():
    def draws(seed):
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed))
        return [sampler([0], random_logits(9)) for _ in range(20)]

    assert draws(4) == draws(4)
    assert draws(4) != draws(5)
    assert draws(None) != draws(None)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad, temperature):
    logits = random_logits(0)
    logits[17] = bad
    with pytest.raises(KvconvError, match="logits hold"):
        Sampler(SamplingParams(temperature=temperature))([0], logits)


@pytest.mark.parametrize(
    ("name", "value", "interval"),
    [
        ("max_new_tokens", 0, "[1, inf)"),
        ("temperature", -0.1, "0, or in [0.001, 1000]"),
        ("temperature", float("nan"), "0, or in [0.001, 1000]"),
        ("temperature", float("inf"), "0, or in [0.001, 1000]"),
        ("top_k", -1, "[0, inf)"),
        ("top_p", 1.01, "[0, 1]"),
        ("top_p", -0.1, "[0, 1]"),
        ("min_p", 2, "[0, 1]"),
        ("repetition_penalty", 0, "[0.001, 1000]"),
        ("seed", -1, "[0, 2**64)"),
        ("seed", 2**64, "[0, 2**64)"),
    ],
)
def test_params_outside_their_interval_are_refused(name, value, interval):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value}; it must be in {interval}"


@pytest.mark.parametrize("stop", ["END", ("",)])
def test_stop_must_be_a_tuple_of_texts(stop):
    with pytest.raises(ValueError, match="stop is"):
        SamplingParams(stop=stop)
