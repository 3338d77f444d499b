"""The C and C++ recipes under ASan (leaks included) and TSan: `make test-native`."""

import os
import shutil
import subprocess
from pathlib import Path

import onnxruntime
import pytest

from kvconv import custom_ops
from tiny_bundle import TinyDecoder, write_bundle

ROOT = Path(__file__).parents[3]
BUILDS = {"address,undefined": "KVCONV_SANITIZED", "thread": "KVCONV_THREAD_SANITIZED"}
SOURCES = {
    "cc": ROOT / "recipes/embed-c/generate.c",
    "c++": ROOT / "recipes/embed-cpp/generate.cpp",
}
MISUSE = r"""
#include <kvconv.h>
#include <stdio.h>
#define REFUSED(call, code) do { kvconv_status s = (call); if (s != code) { \
  fprintf(stderr, "line %d: %d, %s\n", __LINE__, s, kvconv_last_error()); return 1; } } while (0)
int main(int argc, char **argv) {
  kvconv_model_options options = KVCONV_MODEL_OPTIONS_INIT;
  kvconv_model *model = NULL;
  kvconv_generator *generator = NULL, *copy = NULL;
  const int32_t ids[] = {1, 2, 3, 100000};
  int32_t token, finish, needed, few[1];
  (void)argc;
  REFUSED(kvconv_model_open("/nowhere", &options, &model), KVCONV_BUNDLE_ERROR);
  REFUSED(kvconv_model_open(argv[1], NULL, &model), KVCONV_INVALID_ARGUMENT);
  options.abi_version = 99;
  REFUSED(kvconv_model_open(argv[1], &options, &model), KVCONV_ABI_MISMATCH);
  options.abi_version = KVCONV_ABI_VERSION;
  REFUSED(kvconv_generator_create(NULL, 8, 0, &generator), KVCONV_INVALID_HANDLE);
  for (int i = 0; i < 3; ++i) {
    REFUSED(kvconv_model_open(argv[1], &options, &model), KVCONV_OK);
    REFUSED(kvconv_generator_create(model, 8, 0, &generator), KVCONV_OK);
    kvconv_model_destroy(model);
    kvconv_model_destroy(model);
    REFUSED(kvconv_generator_create(model, 8, 0, &copy), KVCONV_INVALID_HANDLE);
    REFUSED(kvconv_generator_append(generator, ids, 4), KVCONV_INVALID_ARGUMENT);
    REFUSED(kvconv_generator_append(generator, ids, 3), KVCONV_OK);
    REFUSED(kvconv_generator_get_tokens(generator, few, 1, &needed), KVCONV_BUFFER_TOO_SMALL);
    REFUSED(kvconv_generator_fork(generator, &copy), KVCONV_OK);
    kvconv_generator_destroy(generator);
    REFUSED(kvconv_generator_next(generator, NULL, &token, &finish), KVCONV_INVALID_HANDLE);
    while (kvconv_generator_next(copy, NULL, &token, &finish) == KVCONV_OK) {}
    REFUSED(kvconv_generator_next(copy, NULL, &token, &finish), KVCONV_CACHE_FULL);
    REFUSED(kvconv_generator_rewind(copy, 99), KVCONV_INVALID_ARGUMENT);
    REFUSED(kvconv_generator_reset(copy), KVCONV_OK);
    kvconv_generator_destroy(copy);
    kvconv_generator_destroy(NULL);
  }
  return 0;
}
"""


@pytest.fixture(scope="module", params=BUILDS)
def sanitizer(request) -> tuple[str, Path]:
    build = os.environ.get(BUILDS[request.param])
    if build is None:
        pytest.skip(f"{BUILDS[request.param]} does not name a build; see `make test-native`")
    libraries = Path(build).resolve() / "lib"
    if not (libraries / custom_ops.library_path().name).exists():
        shutil.copy(custom_ops.library_path(), libraries)
    return request.param, libraries


@pytest.fixture(scope="module", params=["flash", "standard"])
def bundle(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized") / "bundle"
    return write_bundle(folder, decoder=TinyDecoder(3), attention=request.param)


def run(
    compiler: str, source: Path, sanitizer: tuple[str, Path], tmp_path: Path, *arguments: str
) -> str:
    kind, libraries = sanitizer
    program = tmp_path / "program"
    command = [compiler, f"-fsanitize={kind}", "-g1", "-O1", str(source), "-o", str(program)]
    command += [f"-I{ROOT / 'runtime/native/include'}", f"-L{libraries}", "-lkvconv_runtime"]
    subprocess.run([*command, f"-Wl,-rpath,{libraries}", "-pthread"], check=True)
    capi = Path(onnxruntime.__file__).parent / "capi"
    environment = {**os.environ, "KVCONV_ONNXRUNTIME": str(capi)}
    result = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_four_users_in_four_threads_run_clean(sanitizer, bundle, tmp_path):
    output = run("cc", SOURCES["cc"], sanitizer, tmp_path, "--users", str(bundle))
    assert output.count("user ") == 4


def test_cpp_program_runs_clean(sanitizer, bundle, tmp_path):
    arguments = ("--ids", str(bundle), "12", "1", "2", "3")
    assert run("c++", SOURCES["c++"], sanitizer, tmp_path, *arguments).split()


def test_misuse_in_c_runs_clean(sanitizer, bundle, tmp_path):
    source = tmp_path / "misuse.c"
    source.write_text(MISUSE)
    run("cc", source, sanitizer, tmp_path, str(bundle))
