# Everything a developer or CI runs. Each target sets up .venv first, where that is not done yet.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Newer than what it depends on: the virtual environment has what they ask for.
SET_UP := $(VENV)/.set-up
CHECKPOINT ?= fixtures/lightning/mamba-kjv.ckpt

# Threads of torch that wait for one another sleep: by default they spin, and take the processors
# from the other tests. Commands do so by themselves.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all slow faults fuzz gpu coverage lint types format ort-headers wheel-test clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'PYTHON=python3.12 make ... takes another Python than python3 (3.11 or later).'
	@echo 'On Linux, pip takes a torch with CUDA in it, of several gigabytes. For a machine without'
	@echo 'a GPU, export PIP_EXTRA_INDEX_URL first: the address that pytorch.org, "Get started",'
	@echo 'shows for pip and CPU after --index-url.'

setup: $(SET_UP) ## the virtual environment .venv, with all that is needed here

demo: $(SET_UP) ## export a Lightning checkpoint to every format, and verify the bundle
	@$(MAKE) --no-print-directory ort-headers || \
		echo 'so the fused kernels in ONNX Runtime will be unsupported'
	$(BIN)/fuseport export $(CHECKPOINT) -o .demo/bundle --force
	$(BIN)/fuseport verify .demo/bundle

test: lint ## style, types, and tests; of what is slow an eighth, which takes turns
	@$(MAKE) --no-print-directory ort-headers || \
		echo 'so the tests of fused kernels in ONNX Runtime will be skipped'
	$(BIN)/fuseport ops build
	@$(MAKE) --no-print-directory coverage
	$(call IN_PARALLEL) --slow $(SLOW) $(addprefix --ignore=,$(COVERED))

test-all: ## style, types and all tests, every check of every op, the whole vocabulary, every fault
	@$(MAKE) --no-print-directory test SLOW=all
	$(BIN)/fuseport ops check
	$(BIN)/fuseport cases check
	@$(MAKE) --no-print-directory faults

faults: $(SET_UP) ## every death of every runtime, every fault of every writer; takes many minutes
	$(BIN)/python -m pytest -n logical --maxprocesses 2 -m faults
	$(BIN)/python tests/benchmarks/faults.py
	FUSEPORT_MOMENTS=40 $(BIN)/python -m pytest tests/test_interrupted.py

gpu: $(SET_UP) ## on a machine with a GPU: its tests, a bundle, sanitizers, figures, random shapes
	@$(MAKE) --no-print-directory ort-headers || \
		echo 'so the fused kernels in ONNX Runtime will be unsupported'
	$(BIN)/python -m pytest tests/ops/test_cuda.py tests/ops/test_ms_deform_attn_gather.py \
		tests/ops/test_onnxruntime_cuda.py tests/test_device.py
	$(BIN)/fuseport export $(CHECKPOINT) -o .demo/gpu --force --format all --device cuda
	$(BIN)/fuseport verify .demo/gpu --device cuda --reference cpu
	$(BIN)/fuseport verify .demo/gpu --device cuda --self-test
	for tool in memcheck racecheck initcheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python \
			tests/benchmarks/random_shapes.py --device cuda --count 220 --jobs 1 --json - \
			|| exit 1; done
	$(BIN)/fuseport bench .demo/gpu --device cuda
	$(BIN)/python tests/benchmarks/gpu.py
	$(BIN)/python tests/benchmarks/random_shapes.py --device cuda

# Another number: make fuzz COUNT=1000000
COUNT ?= 100000
fuzz: $(SET_UP) ## mutated checkpoints and artifacts, 100,000 of them; it takes hours
	$(BIN)/python -W ignore -m fuseport.tests.corpus.fuzz --count $(COUNT)

# Of the rest nobody counts branches, which takes time.
COVERED := $(addprefix tests/test_,$(addsuffix .py,corpus checkpoint checkpoint_distributed checkpoint_shards \
	checkpoint_layouts corners bundle compare writers))
# Of what tests/slow.json lists: a share, which by the commit; or all.
SLOW ?= share
# Three workers on two processors: they wait for children, too. Which file is next, conftest.py says.
WORKERS = $$(( ($$($(BIN)/python -c 'import os; print(min(os.cpu_count() or 1, 6))') * 3 + 1) / 2 ))
IN_PARALLEL = $(BIN)/python $(1) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

slow: $(SET_UP) ## measure what of the tests is slow: tests/slow.json
	$(call IN_PARALLEL) --slow measure tests

coverage: $(SET_UP) ## branches of the loader, the writer and the comparator that tests take
	$(call IN_PARALLEL,-m coverage run) $(COVERED)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

lint: types ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy wants a folder called fuseport, whatever the clone is called, and follows no editable install.
types: $(SET_UP) ## types
	@mkdir -p $(VENV)/mypy && ln -sfn "$(CURDIR)" $(VENV)/mypy/fuseport
	MYPYPATH=$(VENV)/mypy $(BIN)/mypy -p fuseport

format: $(SET_UP) ## put the sources into style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# fuseport looks for them in the folder of its virtual environment, too.
ort-headers: $(SET_UP) ## ONNX Runtime's C headers into .venv, unless the machine has them
	@$(BIN)/python -c 'from fuseport.ops import ort; ort.headers()' 2>/dev/null || \
		.ci/onnxruntime-headers $(VENV)/include/onnxruntime

wheel-test: $(SET_UP) ## build the wheel, and do the whole job with it outside the repository
	.ci/wheel-test $(BIN)/python $(CHECKPOINT)

clean: ## remove what the other targets made
	rm -rf $(VENV) .demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SET_UP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'fuseport needs Python 3.11 or later; $(PYTHON) is:' "$$($(PYTHON) --version 2>&1)" >&2; \
		echo 'Name another one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo '$(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)' >&2; \
		exit 1; }
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@
