# Entry points for a fresh machine with Python 3.11, 3.12 or 3.13, make, git and a C++ compiler: `make demo`, `make test`.
# `make help` lists the rest. Variables read by requirements/install.sh:
#   PYTHON=…       the interpreter (default: the first suitable one of python3.11, python3.12, python3.13, python3)
#   TORCH_INDEX=…  an index with CPU builds of torch, if pip's configuration names none
#   TORCH_UNVERIFIED=1  accepts a build of torch whose hash is not in requirements/torch-cpu.lock
# Variables read by this file:
#   COMPOSE_ARGS=--keep  keeps what `make test-compose` created
#   PYTEST_ARGS=…  passed to pytest, such as PYTEST_ARGS="-k sweeper -x"
#   PACKAGE=NAME   `make test` and its stages: the tests of packages/NAME alone; `core`: those of no package
#   RESUME=1       `make test-all` and its stages: without the tests that have passed on this tree
#   SHARE=N        `make test-long`: one in seven of its tests, those whose turn it is with N; CI counts commits
#   REDIS="…"      for `make test-redis`: these servers, of those in tests/redis_servers.py
#   TTSEM_PYTHON=…  Python 3.12 or 3.13, for `make test-ttsem`
#   GPU_PYTHON=…   a Python with vLLM for GPUs, for `make bench-gpu`; GPU_ARGS="--stages kernels,graphs" is passed to it
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
TORCH_INDEX ?=
TORCH_UNVERIFIED ?=
PYTEST_ARGS ?=
PACKAGE ?=
RESUME ?=
SHARE ?=
REDIS ?= redis-6.2 redis-7.0 redis-8.2 valkey-9.1
GPU_PYTHON ?= python3
TTSEM_PYTHON ?= $(firstword $(shell command -v python3.12 python3.13))
GPU_ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
# Stamps: what the stack needs is installed; and what the tests need.
STACK := $(VENV)/.stack
READY := $(VENV)/.ready
CORE := api broker client kernels schemas storage workers
PACKAGES := $(patsubst packages/%/pyproject.toml,%,$(wildcard packages/*/pyproject.toml))
$(if $(filter-out core $(PACKAGES),$(PACKAGE)),$(error PACKAGE=$(PACKAGE): valid: core $(PACKAGES)))

# The model is loaded from a folder: no requests to a hub, no telemetry.
export PYTHON TORCH_INDEX TORCH_UNVERIFIED
export PACKAGE RESUME
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PYTHONUNBUFFERED := 1
# The tests start hundreds of processes: without bytecode on disk each of them compiles our modules again.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(abspath $(BIN)):$(PATH)

# A run that finds nothing to do has not failed: of a share, of a package, or of what a run before it left.
PYTEST = run() { $(BIN)/pytest -ra $(if $(RESUME),--resume) $(PYTEST_ARGS) "$$@" $(if $(RESUME)$(SHARE)$(PACKAGE),|| [ $$? = 5 ]) || failed=1; }; failed=0; run
DONE = exit $$failed
# The package that PACKAGE names, unless it is the core, and else the folders of tests.
BESIDE = $(filter-out core,$(PACKAGE))
FOLDERS = tests $(if $(PACKAGE),,packages/*/tests)
# The tests of a stage, or all.
TESTS = $(or $(BESIDE:%=packages/%/tests$(1:%=/%)),$(wildcard $(FOLDERS:%=%$(1:%=/%))))
# Tests that share an engine, a stack or a file run in one process, the longest first (tests/sets.py), so that none is left with one at the end.
SHARED = --dist loadgroup --no-loadscope-reorder --numprocesses

.PHONY: help install setup model demo up test lint files rooms format types test-unit test-system test-smoke test-web screenshots test-engine test-all test-long test-matrix test-redis test-triton test-torch test-ttsem test-packages test-faults test-machines test-compose fidelity walk perturbed quantised smoke-vllm docs lens sae inspect lm-eval bench bench-gpu pin-images lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STACK) ## install what the stack needs in .venv, from the lock files

setup: $(READY) ## install the environment in .venv, from the lock files, with what the tests need

INSTALLER := requirements/torch-cpu.lock requirements/torch-cuda.lock requirements/uv.lock requirements/install.sh requirements/locked.sh pyproject.toml $(wildcard packages/*/pyproject.toml)
$(STACK): requirements/demo.lock $(INSTALLER)
	@echo "== setting up"
	@requirements/install.sh $(VENV) demo.lock
	@touch $@

$(READY): requirements/cpu.lock $(INSTALLER)
	@echo "== setting up, with the tests' packages"
	@requirements/install.sh $(VENV) cpu.lock
	@touch $(STACK) $@

model: $(STACK) ## download the demo model into the cache folder
	@echo "== demo model"
	@$(BIN)/midstream fetch

demo: $(STACK) ## start the stack, capture, steer and patch a real model, stop
	@$(BIN)/midstream demo

# The notebook finds the stack by its data directory; one that already runs there is used.
first-hour: $(STACK) ## open the first hour, a notebook, beside a stack that ends with it
	@requirements/locked.sh $(VENV) --no-deps --require-hashes -r requirements/notebook.lock
	@mkdir -p .cache; export MIDSTREAM_DATA_DIR="$${MIDSTREAM_DATA_DIR:-$(CURDIR)/.midstream}"; \
	$(BIN)/midstream up >.cache/first-hour.log 2>&1 & up=$$!; trap "kill $$up 2>/dev/null; wait" EXIT; \
	echo "starting the stack (log: .cache/first-hour.log)"; \
	until $(BIN)/midstream status >/dev/null 2>&1; do \
	  kill -0 $$up 2>/dev/null || { tail -n 3 .cache/first-hour.log; exit 1; }; sleep 1; \
	done; \
	$(BIN)/jupyter lab examples/first_hour.ipynb

up: $(STACK) ## run the whole stack until Ctrl-C
	@$(BIN)/midstream up

# Two lanes beside each other keep two cores busy.
test: $(READY) model browser ## the fast tests: lint, unit and system tests, and beside them browser and engine tests; a line for each; a failure does not stop the others (PACKAGE=NAME: those of packages/NAME; PACKAGE=core: those of no package)
	@$(if $(BESIDE),MAKE="$(MAKE)" tests/stages.sh lint $(STAGES),MAY=900 MAKE="$(MAKE)" tests/stages.sh test-system test-unit -- lint test-smoke test-engine)
STAGES = $(subst test-web,test-smoke,$(patsubst packages/$(BESIDE)/tests/%,test-%,$(wildcard $(addprefix packages/$(BESIDE)/tests/,unit system web engine))))

test-all: $(READY) model browser ## every test but those of packages and the fault gate, in stages, for the night before a release; hours (RESUME=1: what has not passed on this tree)
	@MAKE="$(MAKE)" tests/stages.sh test-system test-unit test-long test-redis -- lint test-smoke test-engine test-matrix test-triton test-torch

lint: $(READY) ## run ruff and mypy, compile the Lua scripts, look for secrets and for what a merge left
	@echo "== lint"
	@failed=0; \
	! git grep -nE '^(<{7}|>{7}|\|{7})( |$$)' || failed=1; \
	$(BIN)/ruff check $(or $(BESIDE:%=packages/%),.) || failed=1; \
	$(BIN)/ruff format --check $(or $(BESIDE:%=packages/%),.) || failed=1; \
	$(BIN)/python tools/check_lua.py || failed=1; \
	$(BIN)/python tools/check_secrets.py || failed=1; \
	$(MAKE) types || failed=1; \
	exit $$failed

# mypy finds `midstream` through a link of that name, because the repository's folder may have any name, and packages through links beside it.
types: $(READY)
	@mkdir -p .cache/types && ln -sfn "$(CURDIR)" .cache/types/midstream
	@ln -sfn $(foreach name,$(PACKAGES),"$(CURDIR)/packages/$(name)/midstream_$(name)") .cache/types/
	@cd .cache/types && MYPYPATH=".:$(CURDIR)/tests/fake_engine" "$(abspath $(BIN))/mypy" --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" \
	  $(or $(BESIDE:%=-p midstream_%),-m midstream $(CORE:%=-p midstream.%) $(if $(PACKAGE),,$(PACKAGES:%=-p midstream_%)) -p midstream_fake_engine)

files: ## one line for each file of the product: what it is
	@python3 tools/tree.py

rooms: ## one line for each folder of the product, as CONTRIBUTING.md has them
	@python3 tools/tree.py rooms

format: $(READY) ## format the code with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test-unit: $(READY) ## unit tests: no engine, no server
	@echo "== unit tests"
	@$(PYTEST) $(SHARED) 2 --set fast $(call TESTS,unit); $(DONE)

test-system: $(READY) model ## system tests: real Redis, Celery, ZeroMQ and HTTP
	@echo "== system tests"
	@$(PYTEST) $(SHARED) 4 --set fast $(call TESTS,system); $(DONE)

# The tests of the page drive Debian's browser. As root it is installed; otherwise the tests fail and say how to install it.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || true

test-smoke: $(READY) browser ## a few browser tests of the page
	@echo "== browser tests (smoke)"
	@$(PYTEST) --set fast $(call TESTS,web); $(DONE)

test-web: $(READY) browser ## all browser tests of the page: Chromium against a real stack
	@echo "== browser tests"
	@$(PYTEST) $(SHARED) 2 $(call TESTS,web); $(DONE)

screenshots: $(READY) browser ## pictures of the page for docs/page.md
	@$(BIN)/python tools/pages/screenshots.py

# Engines run in parallel, one thread each, without core binding: vLLM would bind all to the same core. Engines of two ranks run alone.
ONE_THREAD = export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
ALL_THREADS = unset OMP_NUM_THREADS VLLM_CPU_OMP_THREADS_BIND

test-engine: $(READY) model ## engine tests: real vLLM on CPU
	@echo "== engine tests"
	@$(ONE_THREAD); $(PYTEST) $(SHARED) 2 --set fast -m "not ranks" $(call TESTS,engine); \
	$(ALL_THREADS); run --set fast -m ranks $(call TESTS,engine); $(DONE)

# The browser's tests are by themselves: while it is open, a loop runs in the test process.
test-long: $(READY) model browser ## long tests: the browser's, blocks of the docs, kills, attacks on other requests' numbers (ATTACK_SECONDS=600: ten minutes per dtype), machines (as root) …; an hour (SHARE=N: a seventh)
	@echo "== long tests"
	@$(ONE_THREAD); $(PYTEST) $(SHARED) 2 --set long $(SHARE:%=--share %) -m "not ranks and not machines and not web" $(call TESTS,); \
	run $(SHARED) 2 --set long $(SHARE:%=--share %) -m web $(call TESTS,web); \
	run --set long $(SHARE:%=--share %) -s -m machines $(call TESTS,machines); \
	$(ALL_THREADS); run --set long $(SHARE:%=--share %) -m ranks $(call TESTS,engine); $(DONE)

# Tables whose every row is an engine of its own. After a change of vLLM, of a table, or of what its rows share.
test-matrix: $(READY) model ## matrix tests: every vLLM option, drafter, family, changed config and quantised format, attacks in each dtype, GPU benchmarks on a CPU, the smoke of vLLM versions; several hours
	@echo "== matrix tests"
	@$(ONE_THREAD); $(PYTEST) $(SHARED) 2 --set matrix -m "not ranks and not packages and not faults" $(call TESTS,); \
	$(ALL_THREADS); run --set matrix -m "ranks and not packages" $(call TESTS,engine); $(DONE)

# `make test-system` runs with the server that is installed, which is the wheel's Valkey 8.1 where there is no other.
test-redis: $(READY) model .cache/redis/.ready ## system tests over other versions of Redis and Valkey; 4 minutes each (REDIS="redis-8.2": only these)
	@failed=0; \
	for server in $(REDIS); do \
	  echo "== system tests with $$server"; \
	  REDIS_SERVER=$$server $(BIN)/pytest -ra $(PYTEST_ARGS) $(SHARED) 4 --set fast $(call TESTS,system) || failed=1; \
	done; \
	exit $$failed

# Each extra in an environment of its own outside of the repository. TORCH_INDEX as for the setup.
test-packages: $(READY) ## the wheel alone, complete and with each extra, on Python 3.11, 3.12 and 3.13; gigabytes of downloads, 70 minutes
	@echo "== packages"
	@$(PYTEST) -m packages $(call TESTS,); $(DONE)

test-faults: $(READY) model ## fault gate: 10,000 jobs with a fixed seed and with a random one, a real engine killed twelve times, and a rank killed at each boundary
	@echo "== fault gate"
	@$(PYTEST) -s $(call TESTS,faults); $(DONE)

test-machines: $(READY) model ## network namespaces as machines, killed, cut off and slow; needs root (MACHINES="-k relay": some)
	@test "$$(id -u)" = 0 || { echo "make test-machines needs root: it lays out network namespaces"; exit 2; }
	@echo "== machines"
	@$(ONE_THREAD); $(PYTEST) -s $(call TESTS,machines) $(MACHINES); $(DONE)

test-compose: $(READY) ## containers: build, start, run the demo, kill each, stop (needs Docker; see docs/deployment.md)
	@$(BIN)/python tools/compose/run.py $(COMPOSE_ARGS)

# Tools that write pages use the engines and references of the tests.
MEASURE := PYTHONPATH="$(CURDIR)/tests/fake_engine:$(CURDIR)/tests/engine:$(CURDIR)/tools/pages:$(CURDIR)/tools/walk" $(BIN)/python
fidelity: $(READY) ## measure every architecture, hook, runner and mode; write docs/reference/fidelity.md (NAMES=…: only these checkpoints)
	@$(MEASURE) tools/pages/fidelity.py $(NAMES)
	@$(MEASURE) tools/pages/fidelity_inside.py $(NAMES)

perturbed: $(READY) ## change fields of configs, one by one; write the table of docs/reference/fidelity.md (NAMES=…: only these classes)
	@OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(MEASURE) tools/pages/perturbed.py $(NAMES)

quantised: $(READY) ## measure quantised checkpoints; write the table of docs/vllm.md
	@$(MEASURE) tools/pages/quantised_page.py

walk: $(READY) ## try a tiny checkpoint of every class that vLLM has; write docs/reference/models.md (NAMES=…: only these classes; ARGS=--rest: what has no result)
	@OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(MEASURE) tools/walk/walk.py $(ARGS) $(NAMES)

# Another environment needs vLLM, the packages of the extras worker and client, and those of the tests: docs/vllm.md.
smoke-vllm: $(READY) ## capture, steer, patch, two ranks and both runners with another vLLM (PYTHON=…: its interpreter)
	@test -n "$(PYTHON)" || { echo "PYTHON=…: the interpreter of an environment with another vLLM"; exit 2; }
	@mkdir -p .cache/types && ln -sfn "$(CURDIR)" .cache/types/midstream
	@PYTHONPATH=.cache/types $(PYTHON) -m midstream.workers.runner.support.seams
	@PYTHONPATH="$(CURDIR)/.cache/types" PATH="$(dir $(abspath $(PYTHON))):$$PATH" $(PYTHON) -m pytest -ra -p no:cacheprovider $(PYTEST_ARGS) tests/engine/test_smoke.py

# Packages that need other versions than vLLM, each in an environment of its own.
LOCKED = requirements/locked.sh .cache/$* --quiet --no-deps --require-hashes $(TORCH_INDEX:%=--extra-index-url %)
.cache/%/.ready: requirements/%.lock requirements/torch-cpu.lock | $(READY)
	@echo "== environment in .cache/$*"
	@PYTHON=$(BIN)/python requirements/install.sh .cache/$* $*.lock
	@touch $@
.PRECIOUS: .cache/%/.ready

# Those without torch; Midstream itself is installed only where it is imported.
LIGHT := docs inspect lm-eval redis
# Other versions of torch and Triton, of the usual image for CUDA.
OVER := torch-2.11 triton-3.6
# Built by the tests' setuptools, so that nothing is downloaded without a hash.
.cache/inspect/.ready: INSTALLED = rm -rf .cache/inspect/wheel && mkdir .cache/inspect/wheel \
	&& for project in . packages/bridges packages/harvest; do (cd $$project && $(abspath $(BIN))/python -c 'import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])' \
	"$(CURDIR)/.cache/inspect/wheel") || exit 1; done >.cache/inspect/build.log 2>&1 \
	&& .cache/inspect/bin/python -m pip install --quiet --no-deps --no-index .cache/inspect/wheel/*.whl
.cache/inspect/.ready .cache/lm-eval/.ready: | $(READY)
# `make docs` needs no engine, and so no environment of ours: any suitable Python makes its own.
ANY_PYTHON = $(firstword $(PYTHON) $(wildcard $(BIN)/python) $(shell command -v python3.11 python3.12 python3.13 python3))
$(LIGHT:%=.cache/%/.ready) $(OVER:%=.cache/%/.ready): .cache/%/.ready: requirements/%.lock pyproject.toml $(wildcard packages/*/pyproject.toml)
	@echo "== environment in .cache/$*"
	@$(ANY_PYTHON) -m venv .cache/$*
	@$(LOCKED) -r $<
	@$(INSTALLED)
	@touch $@

# Another version of torch or Triton comes before all other packages, which are those of .venv.
$(OVER:%=.cache/%/.ready): INSTALLED = $(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	>"$$(.cache/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth"
$(OVER:%=.cache/%/.ready): | $(READY)

test-triton: .cache/triton-3.6/.ready ## the kernels, interpreted and compiled for GPUs, with Triton 3.6; 10 minutes, 190 MB
	@echo "== kernels with Triton 3.6"
	@.cache/triton-3.6/bin/python -m pytest -ra $(PYTEST_ARGS) tests/unit/kernels/test_site_triton.py tests/unit/kernels/test_site_paper.py

test-torch: .cache/torch-2.11/.ready ## the compiled forward passes with torch 2.11; 5 minutes, 3 GB
	@echo "== compiled forward passes with torch 2.11"
	@.cache/torch-2.11/bin/python -m pytest -ra $(PYTEST_ARGS) tests/unit/kernels/test_site_reference.py tests/unit/workers/runner/hooks/test_sites.py

.cache/ttsem/.ready: requirements/ttsem.lock requirements/torch-cpu.lock
	@echo "== environment in .cache/ttsem"
	@test -n "$(TTSEM_PYTHON)" || { echo "ttsem needs Python 3.12 or 3.13; TTSEM_PYTHON=… names one"; exit 2; }
	@PYTHON=$(TTSEM_PYTHON) requirements/install.sh .cache/ttsem ttsem.lock
	@touch $@

test-ttsem: .cache/ttsem/.ready ## the kernels, compiled for a GPU, under ttsem: accesses out of bounds, races, memory that nobody wrote; 2 minutes after 3 GB of downloads
	@echo "== kernels under ttsem"
	@PYTHONPATH=tests .cache/ttsem/bin/python tests/checked_kernels.py

docs: .cache/docs/.ready ## build the documentation as a site in .cache/site, without the engine; links and anchors are checked
	@echo "== documentation"
	@mkdir -p .cache/docs/package/midstream
	@ln -sfn $(foreach name,$(CORE) $(wildcard *.py),"$(CURDIR)/$(name)") .cache/docs/package/midstream/
	@.cache/docs/bin/python docs/site/packages.py
	@PYTHONPATH=.cache/docs/package .cache/docs/bin/python docs/site/build.py
	@echo "  .cache/site/index.html"

sae: .cache/sae/.ready ## install SAELens, which examples/train_sae.py trains with, in .cache/sae

inspect: .cache/inspect/.ready ## install Inspect AI, with the provider `midstream/<model>`, in .cache/inspect

lm-eval: .cache/lm-eval/.ready ## install lm-evaluation-harness in .cache/lm-eval

lens: $(READY) model .cache/lens/.ready ## install TransformerLens and recompute its reference grids, against which patched grids are tested
	@.cache/lens/bin/python tools/peers/lens.py golden
	@.cache/lens/bin/python tools/peers/lens_heads.py
	@.cache/lens/bin/python tools/peers/lens_attribution.py
	@.cache/lens/bin/python tools/peers/lens_facade.py

bench: $(READY) model ## run the benchmarks of benchmarks/RESULTS.md one after the other
	@for script in $(filter-out $(addprefix benchmarks/,engines.py services.py noop_tasks.py),$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

bench-gpu: ## on a GPU machine: run benchmarks/gpu and write its RESULTS.md, 22 minutes (GPU_PYTHON: a Python with vLLM)
	@$(GPU_PYTHON) benchmarks/gpu/all.py $(GPU_ARGS)

pin-images: ## pin the images of others in Dockerfile, compose files and deploy/ to their present digests (needs Docker and the registries)
	@compose/pin.sh

lock: ## resolve the dependencies again (UPGRADE=1: to their newest versions)
	@requirements/compile.sh $(if $(UPGRADE),--upgrade)

clean: ## delete the environment, caches and the demo's data, but not the model
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info .midstream
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
