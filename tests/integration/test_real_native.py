"""SmolLM2 from C, C++ and C#: the tokens of the Python runtime, which equal transformers'.

`test_real_models.py` compares Python with transformers, on the same bundle and prompts.
"""

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvconv import custom_ops
from kvconv.runtime import Generator, SamplingParams
from kvconv_c import Library, Tokenizer
from real_models import PROMPTS, ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
NEW_TOKENS = 48
COMMANDS = {"c": "cc", "cpp": "c++", "csharp": "mcs"}


@pytest.fixture(scope="module")
def bundle(export) -> Path:
    return export("smollm2")


@pytest.fixture(scope="module")
def python(bundle) -> Generator:
    return Generator.open(bundle, threads=2, spin=False)  # two pools of threads share the cores


@pytest.fixture(scope="module", params=COMMANDS)
def program(request, tmp_path_factory) -> Path:
    if shutil.which(COMMANDS[request.param]) is None:
        pytest.skip(f"{COMMANDS[request.param]} is not installed (mono-mcs and mono-runtime)")
    path = tmp_path_factory.mktemp("programs") / f"embed-{request.param}"
    kvconv = path.with_name("kvconv")
    kvconv.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "from kvconv.cli import main; main()" "$@"\n'
    )
    kvconv.chmod(0o755)
    build = ROOT / "recipes" / path.name / "build.sh"
    environment = {**os.environ, "KVCONV": str(kvconv)}
    subprocess.run([build, path], check=True, env=environment)
    return path


def run(program: Path, *arguments: object) -> str:
    result = subprocess.run([program, *map(str, arguments)], capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def test_c_gives_the_tokens_of_python_greedy_and_sampled(bundle, python):
    library = Library(custom_ops.library_path().parent / "libkvconv_runtime.so")
    model, tokenizer = library.open(bundle, threads=2, no_spin=1), Tokenizer(library, bundle)
    for seed, prompt in enumerate(PROMPTS):
        ids = python.encode(prompt)
        assert tokenizer.encode(prompt) == ids
        greedy = SamplingParams(max_new_tokens=NEW_TOKENS)
        sampled = SamplingParams(max_new_tokens=16, temperature=0.9, top_p=0.95, seed=seed)
        for params in (greedy, sampled) if seed < 4 else (greedy,):
            expected = [event.token_id for event in python.generate([ids], params)]
            generator = model.generator(len(ids) + params.max_new_tokens)
            generator.append(ids)
            found = generator.generate(params.max_new_tokens, params)
            assert found == expected, prompt
            assert "".join(tokenizer.stream(found)) == python.tokenizer.detokenize(found)


def test_programs_give_the_tokens_of_python(bundle, python, program):
    ids = python.encode(PROMPTS[2])
    events = python.generate([ids], SamplingParams(max_new_tokens=NEW_TOKENS))
    expected = [event.token_id for event in events]
    found = run(program, "--ids", bundle, NEW_TOKENS, *ids)
    assert list(map(int, found.split())) == expected


def test_programs_print_the_text_and_serve_users(bundle, python, program):
    if ctypes.util.find_library(f"python3.{sys.version_info.minor}") is None:
        pytest.skip("the tokenizer library of PyPI needs libpython, which is not installed")
    text = "".join(python.stream(PROMPTS[1], SamplingParams(max_new_tokens=12)))
    assert run(program, bundle, PROMPTS[1], 12) == text
    if program.name != "embed-c":  # which runs users under the sanitizers, on a tiny bundle
        num_users = {"embed-cpp": 4, "embed-csharp": 2}[program.name]
        assert run(program, "--users", bundle).count("What is my name?") == num_users


def test_c_program_needs_no_python(bundle, tmp_path):
    """Libraries copied to a folder of their own, no Python on the PATH, and none in its memory."""
    import onnxruntime

    installed = custom_ops.library_path().parent
    for library in (installed / "libkvconv_runtime.so", custom_ops.library_path()):
        shutil.copy(library, tmp_path)
    (onnxruntime_library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    (tmp_path / onnxruntime_library.name).symlink_to(onnxruntime_library)
    include = installed.parent / "native/include"
    source = ROOT / "recipes/embed-c/generate.c"
    command = ["cc", source, f"-I{include}", "-L.", "-lkvconv_runtime", "-pthread", "-o", "program"]
    subprocess.run([*command, "-Wl,-rpath,$ORIGIN"], check=True, cwd=tmp_path)
    result = subprocess.run(
        [tmp_path / "program", "--ids", bundle, "3", "504"],
        env={"PATH": "/nowhere", "LD_DEBUG": "files"},  # glibc says what is loaded
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 3
    assert "libkvconv_ops" in result.stderr
    assert "libpython" not in result.stderr
