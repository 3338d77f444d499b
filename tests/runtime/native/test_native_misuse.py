"""What a C caller can do wrong: a code and a text, never a crash."""

import ctypes
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from ctypes import byref, c_int32, c_void_p
from pathlib import Path

import pytest

from kvconv import custom_ops, manifest, names
from kvconv.errors import NotEnoughMemoryError
from kvconv.manifest import RunSizes, read_manifest
from kvconv.runtime import Bundle, SamplingParams
from kvconv.runtime import Session as PythonSession
from kvconv_c import Generator, Library, Model, NativeError, Sampling, Stats
from tiny_bundle import VOCAB_SIZE, TinyDecoder, write_bundle

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("misuse") / "bundle"
    return write_bundle(folder, decoder=TinyDecoder(3), attention="flash")


@pytest.fixture(scope="module")
def model(library, bundle) -> Model:
    return library.open(bundle, threads=1)


@pytest.fixture
def spoilt(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "spoilt"))


def code_of(call, *arguments, **named) -> tuple[str, str]:
    with pytest.raises(NativeError) as caught:
        call(*arguments, **named)
    return caught.value.code, str(caught.value)


def test_handles_that_are_null_destroyed_or_of_another_kind_are_refused(library, model):
    generator = model.generator(8)
    calls = ["append", "next", "get_tokens", "get_logits", "rewind", "reset", "fork", "get_stats"]
    arguments = {
        "append": (byref(c_int32(1)), 1),
        "next": (None, byref(c_int32()), byref(c_int32())),
        "get_tokens": (None, 0, byref(c_int32())),
        "get_logits": (byref(c_void_p()), byref(c_int32())),
        "rewind": (0,),
        "reset": (),
        "fork": (byref(c_void_p()),),
        "get_stats": (byref(Stats(ctypes.sizeof(Stats))),),
    }
    stale = c_void_p(generator.handle.value)
    generator.destroy()
    generator.destroy()  # twice is nothing
    for handle in (
        None,
        stale,
        model.handle,
        c_void_p(12345),
        c_void_p(generator.handle.value + 1),
    ):
        for name in calls:
            code, _ = code_of(library.call, f"generator_{name}", handle, *arguments[name])
            assert code == "INVALID_HANDLE"
    assert "NULL" in code_of(library.call, "generator_reset", None)[1]
    library.c.kvconv_generator_destroy(None)
    library.c.kvconv_model_destroy(stale)  # another kind: nothing
    assert model.info.vocab_size == VOCAB_SIZE


def test_new_handles_never_have_the_number_of_old_ones(model):
    seen = set()
    for _ in range(50):
        generator = model.generator(8)
        assert generator.handle.value not in seen
        seen.add(generator.handle.value)
        generator.destroy()


def test_model_may_be_destroyed_before_its_generators(library, bundle):
    model = library.open(bundle, threads=1)
    generator = model.generator(16)
    model.destroy()
    generator.append([1, 2])
    copy = generator.fork()
    generator.destroy()
    assert 0 <= copy.next()[0] < VOCAB_SIZE
    assert code_of(lambda: model.info)[0] == "INVALID_HANDLE"


@pytest.mark.parametrize("name", ["struct_size", "abi_version"])
def test_wrong_versions_are_refused(library, bundle, name):
    for value in (0, 1000):
        code, text = code_of(library.open, bundle, **{name: value})
        assert code == "ABI_MISMATCH"
        assert str(value) in text
    assert library.c.kvconv_abi_version() == 1


def test_null_arguments_are_refused(library, model, bundle):
    options, out = byref(library.options()), byref(c_void_p())
    for arguments in ((None, options, out), (b"x", None, out), (b"x", options, None)):
        assert code_of(library.call, "model_open", *arguments)[0] == "INVALID_ARGUMENT"
    generator = model.generator(8)
    assert code_of(generator.call, "append", None, 2)[0] == "INVALID_ARGUMENT"
    assert code_of(generator.call, "fork", None)[0] == "INVALID_ARGUMENT"
    generator.append([1])
    assert code_of(generator.call, "next", None, None, byref(c_int32()))[0] == "INVALID_ARGUMENT"
    assert generator.tokens == [1]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31 - 1])
def test_token_ids_out_of_range_are_refused_and_nothing_has_run(model, token_id):
    generator = model.generator(16)
    generator.append([1, 2])
    code, text = code_of(generator.append, [3, token_id])
    assert code == "INVALID_ARGUMENT"
    assert str(token_id) in text
    assert str(VOCAB_SIZE) in text
    assert generator.tokens == [1, 2]
    assert generator.stats.cached == 2


def test_empty_prompts_are_refused(model):
    generator = model.generator(16)
    assert code_of(generator.append, [])[0] == "PROMPT_ERROR"
    assert code_of(generator.next)[0] == "PROMPT_ERROR"
    assert code_of(generator.logits)[0] == "PROMPT_ERROR"


def test_capacities_are_checked(model):
    most = model.info.max_sequence_length
    code, text = code_of(model.generator, most + 1)
    assert code == "CACHE_FULL"
    assert str(most) in text
    assert code_of(model.generator, -1)[0] == "INVALID_ARGUMENT"
    assert code_of(model.generator, 8, -1)[0] == "INVALID_ARGUMENT"
    generator = model.generator(4)
    code, text = code_of(generator.append, [1, 2, 3, 4, 5])
    assert code == "CACHE_FULL"
    assert "5" in text
    assert "4" in text
    assert generator.stats.length == 0
    assert code_of(generator.rewind, 1)[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 1e-4),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("struct_size", 8),
    ],
)
def test_sampling_outside_its_interval_is_refused(model, name, value):
    generator = model.generator(8)
    generator.append([1])
    sampling = Sampling.of(SamplingParams())
    setattr(sampling, name, value)
    code, text = code_of(
        generator.call, "next", byref(sampling), byref(c_int32()), byref(c_int32())
    )
    assert code == ("ABI_MISMATCH" if name == "struct_size" else "INVALID_ARGUMENT")
    assert name in text
    assert generator.tokens == [1]


def test_buffers_that_are_too_small_get_nothing_and_say_what_is_needed(model):
    generator = model.generator(8)
    generator.append([5, 6, 7])
    needed, ids = c_int32(), (c_int32 * 2)(-1, -1)
    for arguments in ((ids, 2), (None, 0), (ids, -1)):
        needed.value = 0
        assert code_of(generator.call, "get_tokens", *arguments, byref(needed))[0] == (
            "BUFFER_TOO_SMALL"
        )
        assert needed.value == 3
    assert list(ids) == [-1, -1]


def test_generator_that_another_thread_uses_is_refused(model):
    generator = model.generator(64)
    results: list[str] = []
    start = threading.Barrier(4)

    def use() -> None:
        start.wait()
        for _ in range(200):
            try:
                generator.append([1, 2, 3])
                generator.rewind(0)
            except NativeError as error:
                results.append(error.code)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) <= {"BUSY", "CACHE_FULL"}
    assert "BUSY" in results
    generator.rewind(0)
    generator.append([1])
    assert generator.tokens == [1]


def test_missing_damaged_and_newer_bundles_are_refused(library, spoilt):
    def refusal() -> str:
        code, text = code_of(library.open, spoilt)
        assert code == "BUNDLE_ERROR"
        return text

    whole = (spoilt / names.MANIFEST_FILE).read_text()
    assert "no bundle at" in code_of(library.open, spoilt / "nowhere")[1]
    (spoilt / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refusal()
    (spoilt / "tokenizer.json").unlink()
    assert "incomplete: tokenizer.json" in refusal()
    (spoilt / names.MANIFEST_FILE).write_text(whole.replace("flash", "flush"))
    assert "checksum" in refusal()
    (spoilt / names.MANIFEST_FILE).write_text(whole[:-20])
    assert "not JSON" in refusal()
    newer = dataclasses.replace(
        _manifest(library, whole, spoilt), format_version=manifest.FORMAT_VERSION + 1
    )
    newer.write(spoilt)
    assert str(manifest.FORMAT_VERSION + 1) in refusal()
    (spoilt / names.MANIFEST_FILE).unlink()
    assert names.MANIFEST_FILE in refusal()


def _manifest(library: Library, text: str, folder: Path) -> manifest.Manifest:
    (folder / names.MANIFEST_FILE).write_text(text)
    return read_manifest(folder)


@pytest.mark.parametrize("change", ["vocab_size", "unknown", "cache_layers", "files", "inputs"])
def test_manifests_that_vouch_for_nonsense_are_refused(library, spoilt, change):
    path = spoilt / names.MANIFEST_FILE
    found = read_manifest(spoilt)
    changes = {
        "vocab_size": {"vocab_size": -3},
        "cache_layers": {
            "cache_layers": (dataclasses.replace(found.cache_layers[0], cache_mode="ring"),)
        },
        "files": {"files": {**found.files, "../up": found.files[names.MODEL_FILE]}},
        "inputs": {"inputs": (*found.inputs, "another")},
    }
    if change == "unknown":
        _sign(path, {**json.loads(path.read_text()), "surprise": 1})
    else:
        dataclasses.replace(found, **changes[change]).write(spoilt)
    code, text = code_of(library.open, spoilt)
    assert code == "BUNDLE_ERROR"
    words = {"unknown": "surprise", "files": "../up", "inputs": "another", "cache_layers": "ring"}
    assert words.get(change, change) in text


def _sign(path: Path, document: dict) -> None:
    import hashlib

    document["manifest_sha256"] = "0" * 64
    text = json.dumps(document)
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))


@pytest.mark.parametrize("what", ["weights", "run"])
def test_what_memory_cannot_hold_is_refused_with_the_numbers_of_python(library, spoilt, what):
    sizes = {"weights": RunSizes(2, 16, 2**50), "run": RunSizes(2, 2**38, 0)}[what]
    dataclasses.replace(read_manifest(spoilt), run_sizes=sizes).write(spoilt)

    def native() -> None:
        library.open(spoilt, threads=1).generator(32)

    code, text = code_of(native)
    assert code == "NOT_ENOUGH_MEMORY"
    with pytest.raises(NotEnoughMemoryError) as caught:
        PythonSession(Bundle.open(spoilt), threads=1).new_cache(1, 32)
    numbers = [re.findall(r"[\d,]{4,}", each) for each in (text, str(caught.value))]
    assert numbers[0][:-1] == numbers[1][:-1]  # what is free may have changed meanwhile
    free = [int(found[-1].replace(",", "")) for found in numbers]
    assert abs(free[0] - free[1]) < 2**30


def test_bundle_may_be_moved(library, bundle, tmp_path):
    moved = Path(shutil.copytree(bundle, tmp_path / "一 二"))
    generator = library.open(moved, threads=1).generator(8)
    generator.append([1, 2])
    moved.rename(tmp_path / "elsewhere")  # while it is open
    assert 0 <= generator.next()[0] < VOCAB_SIZE


def test_newer_and_older_operators_are_refused(library, spoilt):
    found = read_manifest(spoilt)
    dataclasses.replace(found, op_version=names.OP_VERSION + 1).write(spoilt)
    code, text = code_of(library.open, spoilt)
    assert code == "LIBRARY_ERROR"
    assert f"version {names.OP_VERSION + 1}" in text
    assert f"has {names.OP_VERSION}," in text or f"has {names.OP_VERSION}." in text


def test_missing_op_library_is_refused(library, bundle, tmp_path):
    code, text = code_of(library.open, bundle, op_library=tmp_path / "none.so")
    assert code == "LIBRARY_ERROR"
    assert "none.so" in text
    assert code_of(library.open, bundle, use_bundle_library=1)[0] == "LIBRARY_ERROR"
    (tmp_path / "text.so").write_text("no library")
    assert code_of(library.open, bundle, op_library=tmp_path / "text.so")[0] == "LIBRARY_ERROR"


OPEN = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from kvconv_c import Library, NativeError
try:
    Library(Path(sys.argv[1])).open(Path(sys.argv[2]))
    print("OK")
except NativeError as error:
    print(error.code, error)
"""


@pytest.mark.parametrize("named", [None, "none.so", "empty"])
def test_missing_onnxruntime_is_refused(bundle, tmp_path, named):
    """In a process of its own, from a folder that has no ONNX Runtime anywhere near."""
    installed = custom_ops.library_path().parent
    for name in ("libkvconv_runtime.so", names.LIBRARY_FILE):
        shutil.copy(installed / name, tmp_path / name)
    (tmp_path / "empty").mkdir()
    environment = {**os.environ}
    environment.pop("KVCONV_ONNXRUNTIME", None)
    if named is not None:
        environment["KVCONV_ONNXRUNTIME"] = str(tmp_path / named)
    code = OPEN.format(tests=str(ROOT / "tests"))
    command = [sys.executable, "-c", code, str(tmp_path / "libkvconv_runtime.so"), str(bundle)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout.startswith("LIBRARY_ERROR"), result.stdout + result.stderr
    assert "KVCONV_ONNXRUNTIME" in result.stdout
    import onnxruntime

    environment["KVCONV_ONNXRUNTIME"] = str(Path(onnxruntime.__file__).parent / "capi")
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout == "OK\n", result.stdout + result.stderr


def test_second_onnxruntime_is_refused(library, model, bundle, tmp_path):
    code, text = code_of(library.open, bundle, onnxruntime_library=tmp_path / "other.so")
    assert code == "LIBRARY_ERROR"
    assert "other.so" in text


def test_failure_keeps_a_text_per_thread(library, model):
    code_of(library.call, "generator_reset", None)
    other: list[bytes] = []
    thread = threading.Thread(target=lambda: other.append(library.c.kvconv_last_error()))
    thread.start()
    thread.join()
    assert other == [b""]
    assert b"NULL" in library.c.kvconv_last_error()


def test_generator_survives_a_refused_call(model):
    generator: Generator = model.generator(16)
    generator.append([1, 2, 3])
    before = generator.logits()
    code_of(generator.append, [10**6])
    code_of(generator.rewind, 99)
    assert (generator.logits() == before).all()
