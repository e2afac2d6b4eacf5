# Everything a developer types. The settings: `make build TORCH_VERSION=2.11.0 CUDA=OFF WERROR=ON PYTHON=python3.12`.
# CUDA: AUTO compiles the kernels when nvcc is found, ON insists, OFF leaves them out, and `wheels` takes nvcc from PyPI
# in the version of the installed torch. OFFLINE=ON: no .venv and no downloads, but PYTHON with the packages it has.
PYTHON ?= python3
TORCH_VERSION ?= 2.15.0
CUDA ?= AUTO
WERROR ?= OFF
# nproc obeys OMP_NUM_THREADS.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)
# Processes of pytest: tests of ranks wait for most of their time, and one more fills the cores.
WORKERS ?= $(shell expr $(JOBS) + 1)
PYTEST_ARGS ?=
BENCH_ARGS ?=
OFFLINE ?= OFF

VENV := .venv
ifeq ($(OFFLINE),ON)
# A Python may have its programs elsewhere than it is itself: cmake and ninja as packages, ruff.
BIN := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
export PATH := $(BIN):$(PATH)
RUN_PYTHON := $(PYTHON)
TOOLS :=
CMAKE := cmake
CTEST := ctest
CMAKE_FLAGS := -G Ninja -DFSDP2X_WERROR=$(WERROR)
else
BIN := $(VENV)/bin
RUN_PYTHON := $(BIN)/python
TOOLS := $(VENV)/.tools-torch-$(TORCH_VERSION)
CMAKE := $(BIN)/cmake
CTEST := $(BIN)/ctest
CMAKE_FLAGS := -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DFSDP2X_WERROR=$(WERROR)
endif
CXX_FILES = $(shell find csrc tests benchmarks -name '*.cpp' -o -name '*.hpp' -o -name '*.cu')
PY_DIRS = $(wildcard python tests benchmarks examples cmake docs)
# A build folder remembers its compiler: nvcc from PyPI has one of its own. Both are shell words, read where nvcc is there.
ifeq ($(CUDA),wheels)
BUILD := build/dev-wheels
CUDA_FLAG := ON
USE_CUDA = CUDACXX=$$($(RUN_PYTHON) cmake/cuda_wheels.py nvcc)
else
BUILD := build/dev
CUDA_FLAG := $(CUDA)
USE_CUDA :=
endif

export OMP_NUM_THREADS ?= 1
# Where no bytecode may be written, each process compiles torch and transformers again: seconds, and there are hundreds.
unexport PYTHONDONTWRITEBYTECODE
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: build wheel cuda-compiler demo demo-real test test-full test-conformance test-upstream test-project durations test-cpp test-ptx test-real test-vllm lint stub format docs docs-serve docs-shoot bench bench-record sanitize gpu-kernels gpu-prebuilt gpu-test gpu-test-8 gpu-bench clean help

help:
	@echo "make build     .venv with torch $(TORCH_VERSION), the tools and fsdp2x (editable, compiled in build/dev)"
	@echo "make wheel     dist/fsdp2x-VERSION+torchX.Y.cuNNN: for others with this torch, without a compiler"
	@echo "make demo      the main job on real text, in a few minutes; results in out/demo"
	@echo "make demo-real  a pretrained chat model from the registry, tuned in 20 minutes; results in out/smollm2"
	@echo "make test      ctest and pytest; test-full adds the slow tests"
	@echo "make test-conformance  the contract of FSDP2 on fsdp2x and on torch's engine; make test runs it on fsdp2x"
	@echo "make test-upstream  the same, and PyTorch's own tests if UPSTREAM names a folder with a runner; TORCH=nightly"
	@echo "make test-project  the tests of the build, the wheel, the harness, and the pages"
	@echo "make durations  each folder's share of the time of make test, which CI compares, in tests/durations.json"
	@echo "make docs      the site of docs/ in build/site, warnings are errors; docs-serve shows it, docs-shoot draws it"
	@echo "make lint      ruff, clang-format, imports and pyrefly's types; format applies the first two"
	@echo "make sanitize  the C++ tests under ASan and UBSan"
	@echo "make test-ptx  nvcc's kernels translated to C++, by the tests of the reference kernels; needs nvcc, no GPU"
	@echo "make test-real  packages that drive FSDP2, installed and run on both engines; skips what cannot be had"
	@echo "make test-vllm  pushes into a real vLLM on the CPU (6 GB in build/vllm); skips what cannot be had"
	@echo "make gpu-test  the kernels and the engine on a GPU; gpu-bench measures them; both skip without one"
	@echo "make gpu-test QUICK=1  what is least known, in nine minutes of one GPU, and QUICK=2, in five; make gpu-test-8 on eight"
	@echo "make gpu-prebuilt  compiles for another machine, which then needs no minutes for it (CONTRIBUTING.md)"
	@echo "make bench     the quick set of benchmarks against stock FSDP2, in minutes; results in out/bench"
	@echo "make bench-record  five full runs of the main ones on a machine that does nothing else, appended to a history"

ifneq ($(TOOLS),)
# The tools are installed once per torch version and change of pyproject.toml; the package itself at every build.
# Bytecode is left to the first import: compiling all of torch and transformers takes half a minute, and most is never read.
$(TOOLS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python cmake/list_extras.py train trl test lint > $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q --no-compile "torch==$(TORCH_VERSION)" "scikit-build-core>=0.11" "cmake>=3.24" ninja \
	  -r $(VENV)/requirements.txt
	rm -f $(VENV)/.tools-torch-*
	touch $@
endif

# The compiler of CUDA as packages, with CUDA=wheels.
cuda-compiler: $(TOOLS)
ifeq ($(CUDA),wheels)
	$(RUN_PYTHON) cmake/cuda_wheels.py requirements > $(VENV)/cuda-requirements.txt
	$(RUN_PYTHON) -m pip install -q -r $(VENV)/cuda-requirements.txt
endif

# Editable: edits of Python files act at once; a changed C++ file, and a new Python file, need `make build` again. Only
# what changed is compiled, because the build folder is kept.
# OFFLINE=ON takes what `make gpu-prebuilt` has compiled elsewhere, if it fits.
PREBUILT := build/prebuilt
USE_PREBUILT = $(if $(filter ON,$(OFFLINE)),$(RUN_PYTHON) cmake/prebuilt.py,false)
PIP_BUILD = --no-build-isolation --no-deps -C cmake.define.FSDP2X_CUDA=$(CUDA_FLAG) \
  -C cmake.define.FSDP2X_WERROR=$(WERROR) -C cmake.define.FSDP2X_TESTING=ON
build: cuda-compiler
	$(USE_PREBUILT) install $(PREBUILT) || \
	  $(USE_CUDA) $(RUN_PYTHON) -m pip install -q $(PIP_BUILD) -C build-dir=$(BUILD) -e .

# For a machine with a GPU and little time. CUDAARCHS is its GPU's, as in
# `make gpu-prebuilt PYTHON=python3.12 TORCH_VERSION=2.11.0 VENV=.venv-gpu CUDAARCHS=90`.
gpu-prebuilt: CUDA_FLAG := ON
gpu-prebuilt: cuda-compiler gpu-kernels
	rm -rf $(PREBUILT)
	$(USE_CUDA) $(RUN_PYTHON) -m pip wheel -q $(PIP_BUILD) -C build-dir=$(BUILD)-$(TORCH_VERSION) -w $(PREBUILT) .
	$(RUN_PYTHON) cmake/prebuilt.py write $(PREBUILT) $(GPU_PROGRAMS) --architectures "$(CUDAARCHS)"

# For whoever has the same minor version of torch; its name says which, and of which CUDA the kernels are. Compiled in a
# folder of its own, for all architectures, whatever the one of `make build` was told.
WHEEL_BUILD := $(subst dev,wheel,$(BUILD))
DIST ?= dist
wheel: cuda-compiler
	rm -rf $(WHEEL_BUILD)/plain
	$(USE_CUDA) $(RUN_PYTHON) -m pip wheel -q --no-build-isolation --no-deps -C build-dir=$(WHEEL_BUILD) \
	  -C cmake.define.FSDP2X_CUDA=$(CUDA_FLAG) -C cmake.define.FSDP2X_WERROR=$(WERROR) -w $(WHEEL_BUILD)/plain .
	$(RUN_PYTHON) cmake/tag_wheel.py $(WHEEL_BUILD)/plain/*.whl $(DIST)

demo: build
	$(RUN_PYTHON) examples/demo.py

# DEMO_ARGS: --short for few steps, --skip to pass without a registry. The packages are kept in build/smollm2.
DEMO_ARGS ?=
demo-real: build
	$(RUN_PYTHON) examples/smollm2/demo.py $(DEMO_ARGS)

# The model checkers explore every order of the same program: they run again when it has changed, and with CI=1.
MODELS = build/cpp/tests/cpp/test_shm_model build/cpp/tests/cpp/test_schedule_model
test-cpp: $(TOOLS)
	$(CMAKE) -S . -B build/cpp $(CMAKE_FLAGS) -DFSDP2X_BUILD_EXTENSION=OFF -DFSDP2X_BUILD_TESTS=ON
	$(CMAKE) --build build/cpp
	if [ -z "$(CI)$(FSDP2X_FULL)" ] && sha256sum --status --check build/cpp/models.passed 2>/dev/null; \
	then without="-LE model"; fi; \
	$(CTEST) --test-dir build/cpp --output-on-failure --no-tests=error --parallel $(JOBS) $$without && \
	sha256sum $(MODELS) > build/cpp/models.passed

# Without tests/ptx, tests/real and tests/servers, which have targets of their own. Several processes, a file to each,
# where pytest-xdist is there; the files of tests/unit, which are short, come last.
PYTEST = $(RUN_PYTHON) -m pytest \
  $$($(RUN_PYTHON) -c 'import xdist; print("-n $(WORKERS) --dist loadfile --no-loadscope-reorder")' 2>/dev/null)
TESTS = tests --ignore=tests/ptx --ignore=tests/real --ignore=tests/servers
# The build, the wheel, the harness, and pages as sessions: few changes concern them.
PROJECT_TESTS = tests/unit/project tests/docs/test_pages.py
test: build test-cpp
	$(PYTEST) $(TESTS) $(addprefix --ignore=,$(PROJECT_TESTS)) $(PYTEST_ARGS)

# The contract of FSDP2 with torch's own engine, with both transports, and on meshes of 2 x 2. `make test` has it as
# tests/contract/test_conformance.py, with the first and the third line only with CI=1 and in `make test-full`.
CONFORMANCE = $(RUN_PYTHON) -m pytest --noconftest -q -rfE -p fsdp2x.conformance.plugin --pyargs fsdp2x.conformance
test-conformance: build
	$(CONFORMANCE) --engine torch.distributed.fsdp:fully_shard
	$(CONFORMANCE) --engine fsdp2x:fully_shard
	$(CONFORMANCE) --engine fsdp2x:fully_shard --world 2 --engine-option transport=process_group
	$(CONFORMANCE) --engine fsdp2x:fully_shard --world 4 -k "hybrid or scales or mesh or fewer or partial"

# UPSTREAM: a folder with prepare.sh and run.py, which fetch and run PyTorch's own tests. TORCH=nightly: with the newest
# torch before a release, in an environment of its own, if the package index has one.
UPSTREAM ?=
TORCH ?=
ifeq ($(TORCH),nightly)
test-upstream: $(TOOLS)
	@newest=$$($(RUN_PYTHON) -m pip index versions torch --pre 2>/dev/null | sed -n 's/^torch (\(.*\))/\1/p'); \
	case "$$newest" in \
	*dev*|*rc*|*a*|*b*) $(MAKE) test-upstream TORCH= VENV=build/nightly BUILD=build/nightly-dev TORCH_VERSION=$$newest ;; \
	*) echo "The package index has no nightly of torch (newest: $${newest:-none}). Set PIP_EXTRA_INDEX_URL to one that has." ;; \
	esac
else
test-upstream: test-conformance
ifneq ($(UPSTREAM),)
	test -d build/upstream || bash $(UPSTREAM)/prepare.sh build/upstream
	$(RUN_PYTHON) $(UPSTREAM)/run.py --impl torch --workdir build/upstream
	$(RUN_PYTHON) $(UPSTREAM)/run.py --impl fsdp2x --workdir build/upstream
endif
endif

test-project: build
	$(PYTEST) $(PROJECT_TESTS) $(PYTEST_ARGS)

# Records each folder's share of the time, which a complete run with CI=1 compares. On a quiet machine.
durations: export CI := 1
durations: build
	$(PYTEST) $(TESTS) $(addprefix --ignore=,$(PROJECT_TESTS)) --shares write

test-full: export FSDP2X_FULL := 1
test-full: build test-cpp
	$(PYTEST) $(TESTS) --full $(PYTEST_ARGS)

sanitize: $(TOOLS)
	$(CMAKE) -S . -B build/sanitize $(CMAKE_FLAGS) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFSDP2X_SANITIZE=ON \
	  -DFSDP2X_BUILD_EXTENSION=OFF -DFSDP2X_BUILD_TESTS=ON
	$(CMAKE) --build build/sanitize
	$(CTEST) --test-dir build/sanitize --output-on-failure --no-tests=error --parallel $(JOBS)

# Programs that run the kernels on a device, and the same on translated PTX: compiled where nvcc is. Those of a device
# are run where a GPU is.
CONFIGURE_GPU = $(USE_CUDA) $(CMAKE) -S . -B build/gpu $(CMAKE_FLAGS) -DFSDP2X_CUDA=ON -DFSDP2X_BUILD_EXTENSION=OFF \
  -DFSDP2X_BUILD_TESTS=ON

GPU_PROGRAMS := build/gpu/tests/cpp
gpu-kernels: cuda-compiler
	$(USE_PREBUILT) programs $(PREBUILT) $(GPU_PROGRAMS) || \
	  { $(CONFIGURE_GPU) && $(CMAKE) --build build/gpu --target gpu_kernels; }

test-ptx: cuda-compiler
	$(CONFIGURE_GPU)
	$(CMAKE) --build build/gpu --target ptx_programs
	$(RUN_PYTHON) -m pytest tests/ptx $(PYTEST_ARGS)

# Environments are kept in build/real; the first run downloads them. REAL: files or tests of it, in place of all.
REAL ?= tests/real
test-real: build
	$(RUN_PYTHON) -m pytest $(REAL) -rs $(PYTEST_ARGS)

# One engine at a time: each takes 2 GB and, on two cores, minutes to start. The environment is kept in build/vllm.
test-vllm: build
	$(RUN_PYTHON) -m pytest tests/servers --full -rs $(PYTEST_ARGS)

# On all GPUs of this host, in half an hour. DRY_RUN=1: without one, two ranks of the CPU.
gpu-test-8: build
	$(RUN_PYTHON) tests/gpu/run_parts.py eight $(if $(DRY_RUN),--dry-run)

# Both skip, with the reason, what this machine cannot run, begin with what tells the most, and end with a page: claims
# that were shown, targets that were held. The slow ones, compute-sanitizer's, can be left out:
# `make gpu-test PYTEST_ARGS="-m 'not full'"`. A build with CUDA=OFF shows what torch's operations do in their place.
# QUICK=1 and QUICK=2: two calls, what is least known first, compiled for this machine's GPU alone; with DRY_RUN=1
# without one.
ifneq ($(QUICK),)
GPU_ARCHITECTURE := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
ifneq ($(GPU_ARCHITECTURE),)
export CUDAARCHS ?= $(GPU_ARCHITECTURE)
endif
gpu-test: build $(if $(DRY_RUN),,gpu-kernels)
	$(RUN_PYTHON) tests/gpu/run_parts.py $(if $(filter 2,$(QUICK)),second,first) $(if $(DRY_RUN),--dry-run)
else
gpu-test: build gpu-kernels
	$(RUN_PYTHON) -m pytest tests/gpu --full -q -rN --verdict build/gpu/verdict.txt $(PYTEST_ARGS)
endif

gpu-bench: build gpu-kernels
	$(RUN_PYTHON) benchmarks/gpu/targets.py $(BENCH_ARGS)

lint: $(TOOLS)
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	PYTHONPATH=python $(BIN)/lint-imports
	$(BIN)/pyrefly check --python-interpreter-path $(RUN_PYTHON) --output-format min-text

# What a type checker knows of the compiled module, read from it; a unit test says when that is due.
stub: build
	$(RUN_PYTHON) cmake/make_stub.py
	$(BIN)/ruff format python/fsdp2x/_C.pyi

format: $(TOOLS)
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff format $(PY_DIRS)
	$(BIN)/ruff check --fix $(PY_DIRS)

# Needs the built package, which describes its commands and settings. The tools of the site are installed separately.
ifneq ($(TOOLS),)
DOCS_TOOLS := $(VENV)/.tools-docs
$(DOCS_TOOLS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python cmake/list_extras.py docs > $(VENV)/docs-requirements.txt
	$(BIN)/python -m pip install -q -r $(VENV)/docs-requirements.txt
	touch $@
endif

docs: $(DOCS_TOOLS)
	NO_MKDOCS_2_WARNING=1 $(RUN_PYTHON) -m mkdocs build --quiet --strict

docs-serve: $(DOCS_TOOLS)
	NO_MKDOCS_2_WARNING=1 $(RUN_PYTHON) -m mkdocs serve

docs-shoot: docs
ifneq ($(TOOLS),)
	$(RUN_PYTHON) -m pip install -q playwright
endif
	$(RUN_PYTHON) docs/shoot.py

bench: build
	$(RUN_PYTHON) benchmarks/run_all.py --quick --results out/bench
	-$(RUN_PYTHON) benchmarks/history.py check out/bench

bench-record: build
	$(RUN_PYTHON) benchmarks/history.py record $(BENCH_ARGS)
	$(RUN_PYTHON) benchmarks/history.py write
	$(RUN_PYTHON) benchmarks/headline.py
	$(RUN_PYTHON) benchmarks/draw.py

clean:
	rm -rf build build-* dist out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
