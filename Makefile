# make serve    start shoal and serve the default model       (make serve PORT=8123)
# make test     everything that CI runs
# make check    format, lint, types, layers and the tests that need no torch; under a minute
# make bench    the quick form of every benchmark
# make soak     the tests that CI shortens, in full
# make docs     rewrite the reference pages from the code, check every link

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin

.PHONY: serve test check bench soak docs clean
.DEFAULT_GOAL := serve

.venv/serve: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shoal needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make serve PYTHON=python3.12"; exit 1; }
	@echo "Preparing .venv (about a minute the first time; a GPU build of PyTorch is several GB)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[convert]'
	@touch $@

.venv/dev: .venv/serve
	@echo "Adding the development tools to .venv"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: .venv/serve
	@exec $(BIN)/shoal serve --port $(PORT) --controller-port $$(($(PORT) + 1))

check: .venv/dev
	@$(BIN)/ruff format --check src tests bench examples docs
	@$(BIN)/ruff check src tests bench examples docs
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/pytest -q -n 2 --dist loadfile -m 'not torch and not processes'

test: .venv/dev
	@$(BIN)/ruff format --check src tests bench examples docs
	@$(BIN)/ruff check src tests bench examples docs
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/shoal pull smollm2-135m
	@$(BIN)/pytest -n 2 --dist loadfile

bench: .venv/dev
	@for script in core_speed scheduling preemption first_token batching roofline step_breakdown attention perplexity batch_invariant digests disk kv_tiers eviction directory transports peer_fetch overlap migration disaggregation; do $(BIN)/python bench/$$script.py --quick || exit 1; done

soak: .venv/dev
	@$(BIN)/pytest --full --timeout 3600 tests/engine/test_parity_smollm2.py tests/engine/test_bfloat16.py tests/engine/test_sample.py \
		tests/engine/test_batch_invariant.py

docs: .venv/dev
	@$(BIN)/python docs/build.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
