# Plain `make` prints this list. CI runs exactly these targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
DEMO := demo/smollm2
NATIVE_SOURCES := CMakeLists.txt $(shell find custom_ops -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)
PYTHON_FOLDERS := src converter runtime custom_ops tests recipes
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo dev test test-fast test-kinds test-kernels test-native test-real test-all lint fix docs kernels gpu-check models-table clean

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

test-native:  ## the C++ tests and the shape fuzzer under ASan and UBSan
	@command -v cmake >/dev/null || { $(MAKE) $(VENV)/.dev && $(PIP) cmake; }
	PATH="$$PATH:$(CURDIR)/$(BIN)" && cmake -S . -B build/sanitize -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVCONV_BUILD_TESTS=ON -DKVCONV_SANITIZE=ON -DKVCONV_WERROR=ON \
	  && cmake --build build/sanitize --parallel && ctest --test-dir build/sanitize --output-on-failure

test-real: $(VENV)/.dev  ## tests on SmolLM2 and Gemma 3
	$(BIN)/python recipes/demo/fetch.py smollm2 gemma3 chat-templates --to models
	$(BIN)/python -m pytest -q -m "real and not slow"

test-all: test  ## and those that take longer than CI has
	$(BIN)/python -m pytest -q -m slow

lint: $(VENV)/.dev  ## format check, lint, types, import layers
	$(BIN)/ruff format --check $(PYTHON_FOLDERS)
	$(BIN)/ruff check $(PYTHON_FOLDERS)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h')

fix: $(VENV)/.dev  ## repair what ruff and clang-format can
	$(BIN)/ruff check --fix $(PYTHON_FOLDERS)
	$(BIN)/ruff format $(PYTHON_FOLDERS)
	$(BIN)/clang-format -i $$(git ls-files '*.cc' '*.h')

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
