# Every target makes what it needs first: the virtual environment, torch, the library, the tools.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install
TORCH := $(VENV)/torch-$(TORCH_VERSION)
INSTALLED := $(VENV)/installed
PEERS := $(VENV)/peers
CUDA_VENV := .venv-cuda
CUDA_BIN := $(CUDA_VENV)/bin
# Where nvcc is, also if the one on the PATH is a script that calls it.
CUDA_TOOLKIT := nvcc --dryrun -c x.cu 2>&1 | sed -n 's/^\#\$$ _HERE_=\(.*\)\/bin$$/\1/p'
LIBRARY := torch_attn/libattn.so
CXX_FILES := $(shell find csrc examples tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cuh' -o -name '*.cu')

# Of what ninja prints, the names of the files.
PROGRESS := sed -uE 's!^(\[[0-9]+/[0-9]+\]) .* -c [^ ]*/(csrc/[^ ]+) -o .*!\1 \2!; s!^.* -shared .*!linking!'

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test bench bench-peers check-cuda lint format

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1           |\2/p' $(MAKEFILE_LIST) | sed -E 's/^(.{17}) *\|/\1/'

demo: $(INSTALLED) $(LIBRARY) ## a real model, a training run, a parity table and a picture, into out/
	@$(BIN)/python -m examples.demo

test: $(INSTALLED) $(LIBRARY) ## all tests
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile tests

bench: $(INSTALLED) $(LIBRARY) ## speed against the built-in (of a GPU if there is one), and a chart, into out/
	@$(BIN)/python benchmarks/bench.py --json out/bench.json --chart out/speed.png

bench-peers: $(PEERS) $(LIBRARY) ## speed against the other attentions of a CPU
	@$(BIN)/python benchmarks/peers.py --json out/peers.json

check-cuda: $(CUDA_VENV)/installed ## a build with CUDA, all that needs no GPU checked; needs nvcc
	@echo "==> Compiling build/cuda/torch_attn/libattn.so"
	@CUDA_HOME=$${CUDA_HOME:-$$($(CUDA_TOOLKIT))} ATTN_CUDA=1 $(CUDA_BIN)/python setup.py build_ext \
	  --build-lib build/cuda 2>&1 | $(PROGRESS)
	@ATTN_LIBRARY=build/cuda/torch_attn/libattn.so $(CUDA_BIN)/python -m tests.cuda.check_build

lint: $(INSTALLED) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(INSTALLED) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

$(TORCH):
	@echo "==> Making $(VENV) with torch $(TORCH_VERSION)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH_VERSION) numpy 'setuptools>=77' ninja
	@touch $@

# sed: of each compiler command, the file it compiles.
$(LIBRARY): $(TORCH) setup.py $(shell find csrc -type f)
	@echo "==> Compiling $@"
	@$(BIN)/python setup.py build_ext --inplace 2>&1 | $(PROGRESS)

# torch is named again so that no dependency brings another one.
$(INSTALLED): $(TORCH) pyproject.toml
	@$(MAKE) --no-print-directory $(LIBRARY)
	@echo "==> Installing torch_attn and what demo, tests and lint need"
	$(PIP) --no-build-isolation torch==$(TORCH_VERSION) -e '.[demo,test,lint]'
	@touch $@

# Of the same version; === takes the build of the package index, which has CUDA.
$(CUDA_VENV)/installed:
	@echo "==> Making $(CUDA_VENV) with a CUDA build of torch $(TORCH_VERSION) (5 GB)"
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_BIN)/python -m pip --disable-pip-version-check install 'torch===$(TORCH_VERSION)' numpy 'setuptools>=77' ninja
	@touch $@

$(PEERS): $(INSTALLED)
	@echo "==> Installing what bench-peers compares"
	$(PIP) --no-build-isolation torch==$(TORCH_VERSION) -e '.[peers]'
	@touch $@
