# Everything that a fresh machine with Python 3.11, 3.12 or 3.13, make, git and a C++ compiler needs: `make demo`, `make test`.
# `make help` lists the rest. What requirements/install.sh reads:
#   PYTHON=…       the interpreter (default: the first of python3.11, python3.12, python3.13, python3 that fits)
#   TORCH_INDEX=…  an index with CPU builds of torch, where pip's own configuration names none
#   TORCH_UNVERIFIED=1  takes a build of torch whose hash is not in requirements/torch-cpu.lock
# and what this file reads:
#   COMPOSE_ARGS=--keep  leaves what `make test-compose` made
#   PYTEST_ARGS=…  passed on, such as PYTEST_ARGS="-k sweeper -x"
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
TORCH_INDEX ?=
TORCH_UNVERIFIED ?=
PYTEST_ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := api broker client kernels schemas workers

# The model comes from a folder: nothing is asked of a hub, nothing is reported to anybody.
export PYTHON TORCH_INDEX TORCH_UNVERIFIED
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PYTHONUNBUFFERED := 1
# The tests start hundreds of processes: without bytecode on disk each of them compiles our modules again.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(abspath $(BIN)):$(PATH)

PYTEST = $(BIN)/pytest -ra --durations=15 $(PYTEST_ARGS)

.PHONY: help setup model demo up test lint format types test-unit test-system test-engine test-long test-faults test-compose fidelity lens bench lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## the environment in .venv, from the locks

$(READY): requirements/cpu.lock requirements/torch-cpu.lock requirements/torch-cuda.lock requirements/install.sh pyproject.toml
	@echo "== setting up"
	@requirements/install.sh $(VENV)
	@touch $@

model: $(READY) ## the demo model, in the cache folder
	@echo "== demo model"
	@$(BIN)/python -m midstream.workers.demo_model

demo: $(READY) ## start everything, capture, steer and patch a real model, stop
	@$(BIN)/midstream demo

up: $(READY) ## run the whole stack here until Ctrl-C
	@$(BIN)/midstream up

test: $(READY) ## lint, then unit, system and engine tests; all run, any failure fails
	@failed=""; started=$$SECONDS; \
	for stage in lint test-unit test-system test-engine; do \
	  $(MAKE) $$stage || failed="$$failed $$stage"; \
	done; \
	took=$$((SECONDS - started)); \
	if [ -n "$$failed" ]; then echo "== FAILED:$$failed (after $$took s)"; exit 1; fi; \
	echo "== all passed in $$took s"

lint: $(READY) ## ruff and mypy
	@echo "== lint"
	@failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(MAKE) types || failed=1; \
	exit $$failed

# mypy finds `midstream` through a link with that name: the repository's folder may be called anything.
types: $(READY)
	@mkdir -p .cache/types && ln -sfn "$(CURDIR)" .cache/types/midstream
	@cd .cache/types && MYPYPATH=. "$(abspath $(BIN))/mypy" --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" \
	  -m midstream $(PACKAGES:%=-p midstream.%)

format: $(READY) ## rewrite the code as ruff wants it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test-unit: $(READY) ## no engine, no server
	@echo "== unit tests"
	@$(PYTEST) --numprocesses 2 --dist loadfile -m "not long" tests/unit

test-system: $(READY) model ## real Redis, Celery, ZeroMQ and HTTP
	@echo "== system tests"
	@$(PYTEST) --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not long" tests/system

# Two engines side by side, with a thread each, wherever there is a core: vLLM would bind both to the same one. Engines of two ranks alone.
test-engine: $(READY) model ## real vLLM on CPU
	@echo "== engine tests"
	@failed=0; \
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(PYTEST) --numprocesses 2 --dist loadfile -m "not ranks and not long" tests/engine || failed=1; \
	$(PYTEST) -m "ranks and not long" tests/engine || failed=1; \
	exit $$failed

test-long: $(READY) model ## what takes minutes each: every block of the docs, attacks on other requests' numbers (ATTACK_SECONDS=600: ten minutes for each dtype), …
	@echo "== long tests"
	@failed=0; \
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(PYTEST) --numprocesses 2 --dist loadfile -m "long and not ranks" tests || failed=1; \
	$(PYTEST) -m "long and ranks" tests/engine || failed=1; \
	exit $$failed

test-faults: $(READY) model ## the fault gate: 10,000 jobs with a fixed seed and a random one, and a real engine killed ten times
	@echo "== fault gate"
	@$(PYTEST) -s tests/faults

test-compose: $(READY) ## the containers: build, bring up, run the demo, kill each, take down (needs Docker; see docs/deployment.md)
	@$(BIN)/python tests/compose/run.py $(COMPOSE_ARGS)

fidelity: $(READY) ## measure every architecture, hook, runner and mode; writes docs/fidelity.md (NAMES=…: only these checkpoints)
	@$(BIN)/python tests/engine/fidelity.py $(NAMES)

lens: $(READY) model ## TransformerLens, and what it says of three facts anew: patched grids are held to it
	@$(BIN)/python -m venv .cache/lens
	@.cache/lens/bin/python -m pip install --quiet --no-deps --require-hashes $(TORCH_INDEX:%=--extra-index-url %) -r requirements/torch-cpu.lock -r requirements/lens.lock
	@.cache/lens/bin/python -c 'import torch' 2>/dev/null || .cache/lens/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/torch-cuda.lock
	@.cache/lens/bin/python benchmarks/lens.py golden

bench: $(READY) model ## the figures of benchmarks/RESULTS.md, one after the other
	@for script in $(filter-out benchmarks/engines.py benchmarks/lens.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

lock: ## resolve the dependencies anew (UPGRADE=1: to their newest versions)
	@requirements/compile.sh $(if $(UPGRADE),--upgrade)

clean: ## the environment, caches and the demo's data; not the model
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info .midstream
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
