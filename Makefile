# Targets of this repository; `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# without an NVIDIA GPU, torch comes from here: 190 MB in place of several GB with CUDA
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# `make serve NAME=second`; not from the environment, where WSL has a NAME
NAME :=

PYTEST := $(BIN)/python -P -m pytest
# some environments forbid bytecode files: then each of hundreds of processes compiles our sources
unexport PYTHONDONTWRITEBYTECODE
# in the order of tests/conftest.py; tests of a file, or of files that share pipelines, stay together
PARALLEL := --dist loadfile --no-loadscope-reorder --numprocesses

.DEFAULT_GOAL := help
.PHONY: help serve test test-fast test-long test-search test-clients test-all check docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

serve: $(VENV)/.serve  ## a demo model in two tensor-parallel workers; NAME=second: a second one
	$(BIN)/launch all --tp 2 $(NAME:%=--name %)

# three at a time on two cores: tests of pipelines wait for processes a fifth of their time
test: $(VENV)/.dev  ## the tests that need no GPU
	$(PYTEST) $(PARALLEL) 3

test-fast: $(VENV)/.dev  ## tests of modules, without a pipeline
	$(PYTEST) $(PARALLEL) 2 -m 'not (pipeline or chaos or slow or search or long or gpu or clients)' \
		--ignore tests/pipeline --ignore tests/chaos --ignore tests/cluster --ignore tests/gpu

test-long: $(VENV)/.dev  ## what `make test` leaves out: rare deaths, full searches, several machines
	PENSTOCK_SEARCH=1 $(PYTEST) $(PARALLEL) 2 -m '(long or search) and not gpu'

test-search: $(VENV)/.dev  ## searches by random examples, ten times as long as in `make test-long`
	PENSTOCK_SEARCH=10 $(PYTEST) $(PARALLEL) 2 -m 'search and not gpu' --timeout 3000

test-clients: $(VENV)/.dev build/clients/.ready  ## clients in Python and on npm that `make test` lacks
	$(PYTEST) -m clients tests/pipeline/clients

test-all: test test-long test-search test-clients  ## every test that needs no GPU

check: $(VENV)/.dev  ## lint, types, import rules, size budgets, spelling, pages, versions on PyPI
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/penstock
	$(BIN)/lint-imports
	$(BIN)/python -P .ci/size_budget.py
	$(BIN)/python -P .ci/english.py
	$(BIN)/python -P .ci/links.py
	$(BIN)/python -m tests.docs.reference --check
	$(BIN)/zensical build --strict
	$(BIN)/python -P .ci/resolve.py

docs: $(VENV)/.dev  ## the reference pages from the code, and the site in build/site
	$(BIN)/python -m tests.docs.reference
	$(BIN)/zensical build --strict

# uv is faster, but reads neither pip's configuration nor PIP_INDEX_URL and the like
define INSTALL
if command -v uv >/dev/null && ! $(BIN)/pip config list | grep -E 'index|links|constraint|cert|proxy' >/dev/null; \
then set -- uv pip install --python $(BIN)/python; \
else set -- $(BIN)/pip install --disable-pip-version-check; fi; \
"$$@" --constraint constraints.txt
endef

$(VENV)/.serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@nvidia-smi -L 2>/dev/null || { echo 'No NVIDIA GPU: the CPU build of torch from $(TORCH_CPU_INDEX)'; \
		export PIP_RETRIES=1; $(INSTALL) --no-deps --index-url $(TORCH_CPU_INDEX) torch; } || \
		echo 'The CPU build of torch was not found. The default build follows, several GB with' \
			'CUDA; `make serve TORCH_CPU_INDEX=URL` names another index.'
	@package='.[cpu]'; if nvidia-smi -L >/dev/null 2>&1; then package=.; fi; \
		$(INSTALL) --editable "$$package"
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	@$(INSTALL) --editable '.[dev]'
	touch $@

build/clients/.ready: tests/pipeline/clients/requirements.txt tests/pipeline/clients/package-lock.json
	test -x build/clients/bin/python || $(PYTHON) -m venv build/clients
	build/clients/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		--requirement tests/pipeline/clients/requirements.txt
	cp tests/pipeline/clients/package.json tests/pipeline/clients/package-lock.json build/clients
	cd build/clients && PATH="$$PWD/bin:$$PATH" npm ci --silent --no-audit --no-fund
	touch $@

clean:  ## remove what make has made
	rm -rf $(VENV) build src/*.egg-info
