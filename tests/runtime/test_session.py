"""The session over tiny hand-built bundles, against the float64 reference of the same weights.

Tolerance: float32 through one layer agrees with float64 within 1e-4 at logits of about 30.
"""

import dataclasses
import weakref

import numpy as np
import onnx
import onnxruntime
import pytest

from kvconv import custom_ops, memory, names, plan
from kvconv.errors import (
    BundleError,
    CacheFullError,
    KvconvError,
    LibraryError,
    NotEnoughMemoryError,
    ProviderError,
)
from kvconv.manifest import Quantization, read_manifest
from kvconv.runtime import cuda
from kvconv.runtime.bundle import Bundle
from kvconv.runtime.session import Session
from tiny_bundle import (
    MAX_SEQUENCE_LENGTH,
    PAD,
    VOCAB_SIZE,
    TinyDecoder,
    write_bundle,
    write_manifest,
)

TOLERANCE = 1e-4
TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33]
DECODER = TinyDecoder(seed=3)


@pytest.fixture(scope="module", params=["standard", "flash"])
def session(request, tmp_path_factory) -> Session:
    folder = tmp_path_factory.mktemp("bundles") / request.param
    bundle = Bundle.open(write_bundle(folder, decoder=DECODER, attention=request.param))
    return Session(bundle, threads=1)


@pytest.fixture
def bundle_folder(tmp_path):
    return write_bundle(tmp_path / "bundle", decoder=DECODER)


def assert_close(found, expected, what="logits"):
    worst = np.unravel_index(np.abs(found - expected).argmax(), found.shape)
    assert np.abs(found - expected).max() <= TOLERANCE, (
        f"{what} at {worst}: found {found[worst]}, expected {expected[worst]}"
    )


def test_reference_depends_on_order_and_position():
    swapped = DECODER.reference([TOKENS[1], TOKENS[0], *TOKENS[2:]])
    assert np.abs(swapped[-1] - DECODER.reference(TOKENS)[-1]).max() > 100 * TOLERANCE


def test_whole_prefill_equals_the_reference(session):
    cache = session.new_cache(1, 32)
    logits = session.run(cache, [TOKENS], num_logits_to_keep=0)
    assert logits.shape == (1, len(TOKENS), VOCAB_SIZE)
    assert logits.dtype == np.float32
    assert_close(logits[0], DECODER.reference(TOKENS))
    assert cache.length == len(TOKENS)


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 4, 3], [1, 11], [11, 1]], ids=str)
def test_pieces_equal_the_reference(session, chunks):
    cache = session.new_cache(1, 32)
    start = 0
    for size in chunks:
        logits = session.run(cache, [TOKENS[start : start + size]], num_logits_to_keep=0)
        assert_close(logits[0], DECODER.reference(TOKENS)[start : start + size], f"at {start}")
        start += size


@pytest.mark.parametrize(("keep", "kept"), [(0, 12), (1, 1), (3, 3), (12, 12), (50, 12)])
def test_num_logits_to_keep_takes_the_last(session, keep, kept):
    logits = session.run(session.new_cache(1, 32), [TOKENS], num_logits_to_keep=keep)
    assert logits.shape == (1, kept, VOCAB_SIZE)
    assert_close(logits[0], DECODER.reference(TOKENS)[-kept:])


def test_left_padded_batch_equals_single_runs(session):
    prompts = [TOKENS, TOKENS[:4], TOKENS[2:9]]
    longest = max(map(len, prompts))
    ids = np.full((3, longest), PAD)
    mask = np.zeros((3, longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    cache = session.new_cache(3, 32)
    logits = session.run(cache, ids, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        assert_close(logits[row, -1], DECODER.reference(prompt)[-1], f"row {row}")
    # Several new tokens with a past, at batch 3.
    more = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    mask = np.concatenate([mask, np.ones((3, 3), np.int64)], axis=1)
    logits = session.run(cache, more, attention_mask=mask, num_logits_to_keep=0)
    for row, prompt in enumerate(prompts):
        expected = DECODER.reference([*prompt, *more[row]])[-3:]
        assert_close(logits[row], expected, f"row {row}, second run")


def test_rewind_and_reset_forget(session):
    cache = session.new_cache(1, 32)
    session.run(cache, [TOKENS])
    cache.rewind(5)
    logits = session.run(cache, [[1, 2, 3]])
    assert_close(logits[0, -1], DECODER.reference([*TOKENS[:5], 1, 2, 3])[-1])
    cache.reset()
    assert cache.length == 0
    assert_close(session.run(cache, [TOKENS])[0, -1], DECODER.reference(TOKENS)[-1])


def test_fork_is_independent(session):
    cache = session.new_cache(1, 32)
    session.run(cache, [TOKENS[:6]])
    fork = cache.fork()
    logits = session.run(cache, [[9, 9]])
    forked = session.run(fork, [TOKENS[6:]])
    assert_close(logits[0, -1], DECODER.reference([*TOKENS[:6], 9, 9])[-1])
    assert_close(forked[0, -1], DECODER.reference(TOKENS)[-1])
    assert (cache.length, fork.length) == (8, 12)


def test_caches_of_one_session_interleave(session):
    first, second = session.new_cache(1, 16), session.new_cache(1, 16)
    session.run(first, [TOKENS[:3]])
    session.run(second, [TOKENS[5:9]])
    logits = session.run(first, [TOKENS[3:6]])
    assert_close(logits[0, -1], DECODER.reference(TOKENS[:6])[-1])


def test_mask_counts_what_is_not_zero(session):
    ones, twos = ([[number] * len(TOKENS)] for number in (1, 2))
    logits = [
        session.run(session.new_cache(1, 32), [TOKENS], attention_mask=m) for m in (ones, twos)
    ]
    np.testing.assert_array_equal(*logits)


def test_position_ids_are_taken(session):
    logits = session.run(session.new_cache(1, 32), [TOKENS], position_ids=[range(1, 13)])
    assert np.abs(logits[0, -1] - DECODER.reference(TOKENS)[-1]).max() > 100 * TOLERANCE


def test_out_receives_the_logits(session):
    out = np.zeros((1, 1, VOCAB_SIZE), np.float32)
    cache = session.new_cache(1, 32)
    assert session.run(cache, [TOKENS[:-1]], out=out) is out
    before = out.copy()
    session.run(cache, [TOKENS[-1:]], out=out)
    assert not np.array_equal(out, before)
    assert_close(out[0, -1], DECODER.reference(TOKENS)[-1])


def test_returned_logits_survive_the_next_run(session):
    cache = session.new_cache(1, 32)
    logits = session.run(cache, [TOKENS[:-1]])
    copy = logits.copy()
    session.run(cache, [TOKENS[-1:]])
    assert np.array_equal(logits, copy)


def test_cache_keeps_no_logits_but_those_it_was_given(session):
    cache, out = session.new_cache(1, 32), np.zeros((1, 1, VOCAB_SIZE), np.float32)
    logits = weakref.ref(session.run(cache, [TOKENS[:-2]], num_logits_to_keep=0))
    assert logits() is None
    session.run(cache, [TOKENS[-2:-1]], out=out)
    session.run(cache, [TOKENS[-1:]], out=out)
    assert_close(out[0, -1], DECODER.reference(TOKENS)[-1])


def test_full_cache_refuses_and_stays_usable(session):
    cache = session.new_cache(1, len(TOKENS))
    session.run(cache, [TOKENS[:-1]])
    with pytest.raises(CacheFullError) as caught:
        session.run(cache, [[1, 2]])
    assert (caught.value.needed, caught.value.capacity) == (13, 12)
    assert cache.length == 11
    logits = session.run(cache, [TOKENS[-1:]])
    assert_close(logits[0, -1], DECODER.reference(TOKENS)[-1])
    with pytest.raises(CacheFullError):
        session.run(cache, [[1]])


def test_capacity_beyond_the_model_is_refused(session):
    with pytest.raises(CacheFullError) as caught:
        session.new_cache(1, MAX_SEQUENCE_LENGTH + 1)
    assert caught.value.capacity == MAX_SEQUENCE_LENGTH


def test_cache_larger_than_the_free_memory_is_refused_with_both_figures(session, monkeypatch):
    planned = plan.plan(plan.bundle_sizes(session.manifest), batch_size=2, context=32)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: planned.run_bytes)
    session.new_cache(2, 32)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: planned.run_bytes - 1)
    with pytest.raises(NotEnoughMemoryError, match="--max-sequence-length") as caught:
        session.new_cache(2, 32)
    assert caught.value.needed_bytes == planned.run_bytes
    assert caught.value.free_bytes == planned.run_bytes - 1


def test_weights_larger_than_the_free_memory_are_refused_before_they_are_loaded(
    session, monkeypatch
):
    weights = plan.bundle_sizes(session.manifest).weight_bytes
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: weights - 1)
    with pytest.raises(NotEnoughMemoryError, match="--weights int4") as caught:
        Session(session.bundle)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (weights, weights - 1)


@pytest.mark.parametrize("arguments", [(0, 8), (1, 0), (-1, 8)], ids=str)
def test_new_cache_refuses_less_than_one(session, arguments):
    with pytest.raises(ValueError, match="at least 1"):
        session.new_cache(*arguments)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[1], [2]], {}, "input_ids"),
        ([1, 2], {}, "input_ids"),
        ([[]], {}, "input_ids"),
        ([[-1]], {}, "input_ids"),
        ([[1, 2]], {"attention_mask": [[1]]}, "attention_mask"),
        ([[1, 2]], {"position_ids": [[0]]}, "position_ids"),
        ([[1, 2]], {"num_logits_to_keep": -1}, "num_logits_to_keep"),
        ([[1, 2]], {"out": np.zeros((1, 2, VOCAB_SIZE), np.float32)}, "out"),
        ([[1, 2]], {"out": np.zeros((1, 1, VOCAB_SIZE))}, "out"),
    ],
)
def test_wrong_shapes_are_refused_before_running(session, ids, options, message):
    cache = session.new_cache(1, 8)
    with pytest.raises(ValueError, match=message):
        session.run(cache, ids, **options)
    assert cache.length == 0


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_id_that_the_model_does_not_know_is_refused(session, token_id):
    cache = session.new_cache(1, 8)
    with pytest.raises(ValueError, match=rf"holds {token_id}; .* below vocab_size {VOCAB_SIZE}"):
        session.run(cache, [[1, token_id, 2]])
    assert cache.length == 0


def test_failed_run_leaves_the_cache(session):
    cache = session.new_cache(1, 8)
    session.run(cache, [TOKENS[:3]])
    with pytest.raises(KvconvError, match="ONNX Runtime failed"):
        session.run(cache, [[1]], position_ids=[[MAX_SEQUENCE_LENGTH]])
    assert cache.length == 3
    logits = session.run(cache, [TOKENS[3:5]])
    assert_close(logits[0, -1], DECODER.reference(TOKENS[:5])[-1])


@pytest.mark.parametrize("attention", ["standard", "flash"])
@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16"])
def test_narrow_caches_run_close_to_the_reference(tmp_path, attention, cache_dtype):
    folder = write_bundle(
        tmp_path / "bundle", decoder=DECODER, attention=attention, cache_dtype=cache_dtype
    )
    session = Session(Bundle.open(folder), threads=1)
    cache = session.new_cache(1, 32)
    session.run(cache, [TOKENS[:8]])
    cache.rewind(6)
    cache = cache.fork()
    logits = session.run(cache, [TOKENS[6:]])
    error = np.abs(logits[0, -1] - DECODER.reference(TOKENS)[-1]).max()
    # Wrong bits would be off by whole logits; bfloat16 keeps 8 bits of each key and value.
    assert 0 < error < {"float16": 0.02, "bfloat16": 0.15}[cache_dtype]


def test_flash_binds_past_and_present_to_the_same_memory(tmp_path):
    folder = write_bundle(tmp_path / "bundle", decoder=DECODER, attention="flash")
    session = Session(Bundle.open(folder), threads=1)
    cache = session.new_cache(1, 32)
    before = [tensor.array.ctypes.data for tensor in cache._tensors]
    session.run(cache, [TOKENS[:5]])
    session.run(cache, [TOKENS[5:6]])
    binding = cache.prepare_run(1)
    for i, name in enumerate((names.past_key(0), names.past_value(0))):
        present = (names.present_key(0), names.present_value(0))[i]
        past_value, present_value = binding._bound_inputs[name], binding._bound_outputs[present]
        assert past_value.data_ptr() == present_value.data_ptr() == before[i]
    written = np.abs(cache._tensors[0].array[0, 0, :6]).sum(axis=-1)
    assert (written > 0).all()


def test_newer_op_version_is_refused(tmp_path):
    folder = write_bundle(tmp_path / "bundle", attention="flash")
    manifest = dataclasses.replace(read_manifest(folder), op_version=names.OP_VERSION + 1)
    manifest.write(folder)
    with pytest.raises(LibraryError, match=f"version {names.OP_VERSION + 1}"):
        Session(Bundle.open(folder))


def test_quantised_weights_of_an_older_op_version_must_be_exported_again(tmp_path):
    folder = write_bundle(tmp_path / "bundle", decoder=DECODER, attention="flash")
    manifest = dataclasses.replace(read_manifest(folder), op_version=1)
    manifest.write(folder)
    session = Session(Bundle.open(folder), threads=1)  # float weights are read as ever
    logits = session.run(session.new_cache(1, 32), [TOKENS])
    assert_close(logits[0, -1], DECODER.reference(TOKENS)[-1])
    quantization = Quantization(32, symmetric=False, accuracy_level=4, method="least squares")
    dataclasses.replace(manifest, weights_dtype="int4", quantization=quantization).write(folder)
    words = rf"version 1 .* has {names.OP_VERSION}.* Export the model again"
    with pytest.raises(LibraryError, match=words):
        Session(Bundle.open(folder))


def test_bundle_library_is_used_only_when_asked(tmp_path):
    folder = write_bundle(tmp_path / "bundle", decoder=DECODER, attention="flash")
    with pytest.raises(LibraryError, match=names.LIBRARY_FILE):
        Session(Bundle.open(folder), use_bundle_library=True)
    library = folder / names.LIBRARY_FILE
    library.write_bytes(b"not a library")
    write_manifest(folder, onnx.load(folder / names.MODEL_FILE), "flash")
    Session(Bundle.open(folder), threads=1)  # the installed one
    with pytest.raises(LibraryError, match="refuses"):
        Session(Bundle.open(folder), use_bundle_library=True)
    library.write_bytes(custom_ops.library_path().read_bytes())
    write_manifest(folder, onnx.load(folder / names.MODEL_FILE), "flash")
    session = Session(Bundle.open(folder), threads=1, use_bundle_library=True)
    logits = session.run(session.new_cache(1, 32), [TOKENS])
    assert_close(logits[0, -1], DECODER.reference(TOKENS)[-1])


def test_absent_provider_names_those_there_are(bundle_folder):
    if cuda.why_unavailable() is None:
        pytest.skip("this machine has CUDA")
    with pytest.raises(ProviderError, match="CUDA cannot be used") as caught:
        Session(Bundle.open(bundle_folder), provider="cuda")
    assert caught.value.provider == "cuda"
    assert caught.value.available == ("cpu",)


def pretend_cuda(monkeypatch):
    """Let CUDA look available, up to where a session is made."""
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: both)
    monkeypatch.setattr(cuda, "why_unavailable", lambda: None)


def test_cuda_is_refused_for_a_bundle_without_kernels(tmp_path, monkeypatch):
    pretend_cuda(monkeypatch)
    folder = write_bundle(tmp_path / "bundle", attention="flash")
    with pytest.raises(ProviderError, match="has no CUDA kernels"):
        Session(Bundle.open(folder), provider="cuda")


def test_provider_that_does_not_start_is_not_replaced_in_silence(bundle_folder, monkeypatch):
    pretend_cuda(monkeypatch)
    with pytest.warns(UserWarning, match="CUDA"), pytest.raises(ProviderError, match="not start"):
        Session(Bundle.open(bundle_folder), provider="cuda")


@pytest.mark.parametrize("spin", [True, False])
def test_spin_reaches_onnxruntime(bundle_folder, spin, monkeypatch):
    given = []
    make = onnxruntime.InferenceSession

    def noted(path, options, **more):
        given.append(options)
        return make(path, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", noted)
    session = Session(Bundle.open(bundle_folder), threads=2, spin=spin)
    (options,) = given
    if spin:  # ONNX Runtime's default
        with pytest.raises(RuntimeError, match="allow_spinning"):
            options.get_session_config_entry("session.intra_op.allow_spinning")
    else:
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    cache = session.new_cache(1, 16)
    np.testing.assert_allclose(
        session.run(cache, [TOKENS])[0, -1], DECODER.reference(TOKENS)[-1], atol=TOLERANCE
    )


def test_threads_below_one_are_refused(bundle_folder):
    with pytest.raises(ValueError, match="threads is 0"):
        Session(Bundle.open(bundle_folder), threads=0)


def test_model_that_does_not_load_is_a_bundle_error(bundle_folder):
    (bundle_folder / names.MODEL_FILE).write_bytes(b"\x08\x0a")
    model = TinyDecoder().graph("standard")
    write_manifest(bundle_folder, model)
    with pytest.raises(BundleError, match="cannot load") as caught:
        Session(Bundle.open(bundle_folder))
    assert caught.value.file == names.MODEL_FILE


def test_graph_other_than_the_manifest_says_is_refused(bundle_folder):
    manifest = read_manifest(bundle_folder)
    outputs = tuple(name for name in manifest.outputs if name != names.present_key(0))
    dataclasses.replace(manifest, outputs=outputs).write(bundle_folder)
    with pytest.raises(BundleError, match=r"present\.0\.key"):
        Session(Bundle.open(bundle_folder))


def test_ring_cache_is_refused_by_name(bundle_folder):
    manifest = read_manifest(bundle_folder)
    (layer,) = manifest.cache_layers
    ring = dataclasses.replace(layer, cache_mode="ring", window_size=4, capacity=8)
    dataclasses.replace(manifest, cache_layers=(ring,)).write(bundle_folder)
    with pytest.raises(BundleError, match="ring"):
        Session(Bundle.open(bundle_folder))


def test_ids_that_are_no_integers_are_refused_not_cut(session):
    cache = session.new_cache(1, 4)
    with pytest.raises(TypeError, match="input_ids is float64; it must hold integers"):
        session.run(cache, np.array([[1.7]]))
    assert cache.length == 0
