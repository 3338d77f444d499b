"""Batches: every prompt once, like lengths together, and none that takes tokens from another."""

import random

import pytest

from kvconv.runtime import SamplingParams
from kvconv.runtime.batches import plan_batches


def plan(lengths, news, *, batch_size, max_sequence_length=10_000):
    params = [SamplingParams(max_new_tokens=new) for new in news]
    return plan_batches(
        lengths, params, batch_size=batch_size, max_sequence_length=max_sequence_length
    )


def test_prompts_are_sorted_by_length_into_full_batches():
    assert plan([5, 1, 4, 2, 3], [9] * 5, batch_size=2) == [[0], [1, 3], [4, 2]]


def test_batches_of_one_keep_the_order():
    assert plan([5, 1, 4], [9] * 3, batch_size=1) == [[0], [1], [2]]


def test_no_prompt_gives_no_batch():
    assert plan([], [], batch_size=3) == []


def test_first_batches_hold_the_first_prompts_of_a_long_list():
    batches = plan(list(range(1000, 0, -1)), [9] * 1000, batch_size=4)
    assert max(i for batch in batches[:8] for i in batch) == 31
    assert len(batches) == 250


def test_prompt_whose_answer_padding_would_cut_gets_a_batch_of_its_own():
    # 90 + 10 slots are all there is; the short prompt would get 10 tokens instead of 60.
    assert plan([90, 5], [60, 60], batch_size=2, max_sequence_length=100) == [[0], [1]]
    assert plan([90, 5], [60, 10], batch_size=2, max_sequence_length=100) == [[1, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_each_prompt_is_there_once_and_gets_the_room_that_it_has_alone(seed):
    draw = random.Random(seed)
    count, batch_size, most = draw.randint(1, 90), draw.randint(1, 9), 100
    lengths = [draw.choice([draw.randint(1, 20), draw.randint(1, 99)]) for _ in range(count)]
    news = [draw.randint(1, 120) for _ in range(count)]
    batches = plan(lengths, news, batch_size=batch_size, max_sequence_length=most)
    assert sorted(i for batch in batches for i in batch) == list(range(count))
    for batch in batches:
        assert 1 <= len(batch) <= batch_size
        longest = max(lengths[i] for i in batch)
        capacity = min(longest + max(news[i] for i in batch), most)
        for i in batch:
            assert min(news[i], capacity - longest) == min(news[i], most - lengths[i])
