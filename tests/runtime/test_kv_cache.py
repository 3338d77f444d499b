"""Both caches without a model: a recording binding, and content written by hand."""

import numpy as np
import pytest

from kvconv import names
from kvconv.errors import CacheFullError, RewindError
from kvconv.manifest import CacheLayer
from kvconv.plan import kv_cache_bytes
from kvconv.runtime.kv_cache import ConcatCache, SharedBufferCache

LAYERS = (
    CacheLayer(2, 4, 6, "float32"),
    CacheLayer(1, 8, 8, "float16", window_size=3),
    CacheLayer(3, 2, 2, "bfloat16"),
    CacheLayer(2, 40, 32, "int8"),
    CacheLayer(1, 64, 8, "int4", window_size=3),
)
TENSORS = 2 * len(LAYERS) + 2 * 2  # the last two have scales


class RecordingBinding:
    """Remembers what was bound under which name."""

    def __init__(self):
        self.inputs, self.outputs = {}, {}

    def bind_ortvalue_input(self, name, value):
        self.inputs[name] = value

    def bind_ortvalue_output(self, name, value):
        self.outputs[name] = value


def make(kind, batch_size=2, capacity=16):
    return kind(LAYERS, batch_size, capacity, RecordingBinding)


def run(cache, sequence_length, start=0):
    """Do what a run does: fill the new slots with numbers that count up from start."""
    binding = cache.prepare_run(sequence_length)
    tensors = cache._tensors if isinstance(cache, SharedBufferCache) else cache._presents
    for index, tensor in enumerate(tensors):
        if isinstance(cache, ConcatCache):
            tensor.array[:, :, : cache.length] = cache._pasts[index].array
        new = tensor.array[:, :, cache.length : cache.length + sequence_length]
        new[...] = np.arange(start, start + sequence_length)[:, None]
    cache.commit_run(sequence_length)
    return binding


def content(cache):
    tensors = cache._tensors if isinstance(cache, SharedBufferCache) else cache._pasts
    return [tensor.array[0, 0, : cache.length, 0].tolist() for tensor in tensors]


@pytest.fixture(params=[SharedBufferCache, ConcatCache])
def cache(request):
    return make(request.param)


@pytest.mark.parametrize(("batch_size", "capacity"), [(1, 1), (2, 16), (3, 1000)])
def test_shared_buffer_bytes_equal_the_plan(batch_size, capacity):
    planned = kv_cache_bytes(LAYERS, batch_size=batch_size, max_sequence_length=capacity)
    cache = make(SharedBufferCache, batch_size, capacity)
    assert cache.nbytes == planned
    run(cache, 1)
    assert cache.nbytes == planned


def test_concat_bytes_follow_the_tokens_held():
    cache = make(ConcatCache)
    assert cache.nbytes == 0
    run(cache, 5)
    assert cache.nbytes == kv_cache_bytes(LAYERS, batch_size=2, max_sequence_length=5)


def test_shared_buffer_binds_one_value_on_both_sides_for_ever():
    cache = make(SharedBufferCache)
    first = run(cache, 3)
    pointers = {name: value.data_ptr() for name, value in first.inputs.items()}
    second = run(cache, 1)
    assert second is first
    assert len(pointers) == TENSORS
    for name, value in second.inputs.items():
        assert value is second.outputs[name.replace("past_key_values", "present")]
    assert {name: value.data_ptr() for name, value in second.inputs.items()} == pointers
    assert len(set(pointers.values())) == len(pointers)


def test_concat_feeds_presents_back_as_pasts():
    cache = make(ConcatCache)
    first = run(cache, 3)
    presents = dict(first.outputs)
    second = run(cache, 2)
    assert second.inputs[names.past_key(1)] is presents[names.present_key(1)]
    assert second.outputs[names.present_key(1)].shape() == [2, 1, 5, 8]


def test_bound_values_have_the_manifest_shapes_and_types():
    binding = make(SharedBufferCache).prepare_run(1)
    found = {name: (value.shape(), value.data_type()) for name, value in binding.inputs.items()}
    assert found == {
        names.past_key(0): ([2, 2, 16, 4], "tensor(float)"),
        names.past_value(0): ([2, 2, 16, 6], "tensor(float)"),
        names.past_key(1): ([2, 1, 16, 8], "tensor(float16)"),
        names.past_value(1): ([2, 1, 16, 8], "tensor(float16)"),
        names.past_key(2): ([2, 3, 16, 2], "tensor(bfloat16)"),
        names.past_value(2): ([2, 3, 16, 2], "tensor(bfloat16)"),
        names.past_key(3): ([2, 2, 16, 40], "tensor(int8)"),
        names.past_value(3): ([2, 2, 16, 32], "tensor(int8)"),
        names.past(3, "key_scale"): ([2, 2, 16, 2], "tensor(bfloat16)"),
        names.past(3, "value_scale"): ([2, 2, 16, 1], "tensor(bfloat16)"),
        names.past_key(4): ([2, 1, 16, 40], "tensor(uint8)"),
        names.past_value(4): ([2, 1, 16, 16], "tensor(uint8)"),
        names.past(4, "key_scale"): ([2, 1, 16, 2], "tensor(bfloat16)"),
        names.past(4, "value_scale"): ([2, 1, 16, 1], "tensor(bfloat16)"),
    }


def test_buffers_start_on_vector_boundaries():
    binding = make(SharedBufferCache, 1, 7).prepare_run(1)
    assert all(value.data_ptr() % 64 == 0 for value in binding.inputs.values())


def test_length_counts_committed_runs(cache):
    run(cache, 5)
    run(cache, 1)
    cache.prepare_run(3)  # a run that fails is never committed
    assert cache.length == 6
    run(cache, 2, start=6)
    assert content(cache) == [[0, 1, 2, 3, 4, 0, 6, 7]] * TENSORS


def test_check_room_refuses_past_capacity_and_changes_nothing(cache):
    run(cache, 15)
    cache.check_room(1)
    with pytest.raises(CacheFullError, match="--max-sequence-length") as caught:
        cache.check_room(2)
    assert (caught.value.needed, caught.value.capacity) == (17, 16)
    assert cache.length == 15


def test_rewind_keeps_the_front(cache):
    run(cache, 6)
    cache.rewind(2)
    run(cache, 2, start=50)
    assert content(cache) == [[0, 1, 50, 51]] * TENSORS


@pytest.mark.parametrize("length", [-1, 7])
def test_rewind_outside_is_refused(cache, length):
    run(cache, 6)
    with pytest.raises(ValueError, match=r"\[0, 6\]"):
        cache.rewind(length)
    assert cache.length == 6


def test_run_that_fails_counts_as_written_by_a_ring():
    layer = CacheLayer(1, 2, 2, "float32", window_size=3, cache_mode="ring", capacity=5)
    cache = SharedBufferCache((layer,), 1, 16, RecordingBinding)
    for _ in range(6):
        cache.prepare_run(1)
        cache.commit_run(1)
    assert (cache.length, cache.most_new_tokens, cache.shortest_rewind) == (6, 3, 3)
    cache.prepare_run(2)  # tokens 1 and 2 are overwritten, whatever comes of it
    assert (cache.length, cache.shortest_rewind) == (6, 5)
    with pytest.raises(RewindError, match="forget 2 of its 6 tokens.* 1 can be taken back"):
        cache.rewind(4)
    cache.rewind(5)


def test_ring_reads_the_length_of_every_run_in_place():
    layer = CacheLayer(1, 2, 2, "float32", window_size=3, cache_mode="ring", capacity=5)
    cache = SharedBufferCache((layer,), 1, 16, RecordingBinding)
    bound = cache.prepare_run(1).inputs[names.PAST_SEQUENCE_LENGTH]
    found = []
    for tokens in (2, 3, 1):
        assert cache.prepare_run(tokens).inputs[names.PAST_SEQUENCE_LENGTH] is bound
        found.append(bound.numpy().tolist())
        cache.commit_run(tokens)
    assert found == [[0], [2], [5]]
    assert names.PAST_SEQUENCE_LENGTH not in make(SharedBufferCache).prepare_run(1).inputs


def test_reset_empties(cache):
    run(cache, 6)
    cache.reset()
    assert cache.length == 0
    run(cache, 1, start=9)
    assert content(cache) == [[9]] * TENSORS


def test_fork_copies_and_then_goes_its_own_way(cache):
    run(cache, 3)
    fork = cache.fork()
    run(cache, 1, start=7)
    run(fork, 2, start=20)
    assert content(cache) == [[0, 1, 2, 7]] * TENSORS
    assert content(fork) == [[0, 1, 2, 20, 21]] * TENSORS
    assert (fork.capacity, fork.batch_size) == (cache.capacity, cache.batch_size)
