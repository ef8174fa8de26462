# make setup | test | test-long | kernels | lint | demo | clean. Needs Python 3.11 or newer: PYTHON=python3.12 make test
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup test test-long kernels lint demo clean

setup: .venv/installed

# Runs again only when the lock or the project file has changed. The lock brings the build backend,
# so the project itself is installed without isolation and without resolving anything.
.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "MSC needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Install one and name it: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Thousands of random calls for each line of the rule table, 20 steps of every named model on every
# mesh, and hundreds of kills of jobs and of what writes checkpoints; takes more than an hour.
test-long: setup
	OMP_NUM_THREADS=1 MSC_TEST_LONG=1 $(BIN)/python -m pytest -n 2 --hypothesis-profile=long \
		tests/passes/sharding/test_rules.py tests/parity/test_matrix.py \
		tests/runtime/checkpoint/test_writing.py tests/checkpoint/test_processes.py tests/codegen/kernels

# Compiles every Triton kernel for sm_80 and sm_90, without a GPU; two minutes on two cores.
kernels: setup
	$(BIN)/python -m benchmarks.kernels

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: setup
	$(BIN)/python examples/demo.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
