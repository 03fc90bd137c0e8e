# make serve    start shoal and serve the default model       (make serve PORT=8123)
# make test     everything that CI runs
# make check    format, lint, types, layers and the tests that need no torch; under a minute
# make bench    the quick form of every benchmark
# make soak     the tests that CI shortens, in full
# make docs     rewrite the reference pages from the code, check every link

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
SOURCES := $(shell find src -type f -not -name "*.pyc")

.PHONY: serve test check bench soak docs clean
.DEFAULT_GOAL := serve

.venv/python: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shoal needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make serve PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv
	@touch $@

# What is installed to serve has a compiled scheduler; what is installed to develop runs as it is edited.
.venv/serve: .venv/python pyproject.toml hatch_build.py $(SOURCES)
	@echo "Preparing .venv (two minutes the first time; a GPU build of PyTorch is several GB)"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt '.[convert]'
	@rm -f .venv/dev && touch $@

.venv/dev: .venv/python pyproject.toml
	@echo "Preparing .venv with the development tools"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f .venv/serve && touch $@

# The same package with its scheduler compiled, for PYTHONPATH.
.venv/compiled: .venv/dev hatch_build.py $(SOURCES)
	@echo "Compiling the scheduler"
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target $@ .
	@ls $@/shoal/core/scheduler.*.so >/dev/null
	@touch $@

serve: .venv/serve
	@exec $(BIN)/shoal serve --port $(PORT) --controller-port $$(($(PORT) + 1))

check: .venv/dev
	@$(BIN)/ruff format --check src tests bench examples docs
	@$(BIN)/ruff check src tests bench examples docs
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/pytest -q -n 2 --dist loadfile -m 'not torch and not processes'

test: .venv/dev .venv/compiled
	@$(BIN)/ruff format --check src tests bench examples docs
	@$(BIN)/ruff check src tests bench examples docs
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/shoal pull smollm2-135m
	@PYTHONPATH=$(CURDIR)/.venv/compiled $(BIN)/pytest -n 2 --dist loadfile -m 'not interpreted' tests/core tests/sim
	@$(BIN)/pytest -n 2 --dist loadfile

bench: .venv/dev .venv/compiled
	@for script in core_speed scheduling preemption first_token batching roofline step_breakdown attention allreduce perplexity batch_invariant digests disk kv_tiers eviction directory transports peer_fetch overlap migration disaggregation layouts context planner; do PYTHONPATH=$(CURDIR)/.venv/compiled $(BIN)/python bench/$$script.py --quick || exit 1; done

soak: .venv/dev
	@$(BIN)/pytest --full --timeout 3600 tests/engine/test_parity_smollm2.py tests/engine/test_bfloat16.py tests/engine/test_sample.py \
		tests/engine/test_batch_invariant.py tests/engine/parallel

docs: .venv/dev
	@$(BIN)/python docs/build.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
