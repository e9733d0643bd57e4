# make serve   a demo model on tcp://127.0.0.1:5555, in two tensor-parallel workers
# make test    the tests that need neither GPU nor network
# make check   lint, types, import rules, size budget, English, links
# make docs    the reference pages from the code, and the site in build/site

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
PACKAGES := kernels launch models protocol services

.PHONY: serve test check docs clean

serve: $(VENV)/.serve
	$(BIN)/launch all --tp 2

test: $(VENV)/.dev
	$(BIN)/python -P -m pytest

check: $(VENV)/.dev typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES:%=build/typing/penstock/%)
	PYTHONPATH=build/typing $(BIN)/lint-imports
	$(BIN)/python -P .ci/size_budget.py
	$(BIN)/python -P .ci/english.py
	$(BIN)/python -P .ci/links.py
	$(BIN)/zensical build --strict

# the reference pages, and the site in build/site
docs: $(VENV)/.dev
	$(BIN)/python -m tests.docs.reference
	$(BIN)/zensical build --strict

$(VENV)/.serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP) --editable '.[dev]'
	touch $@

# mypy and import-linter want the folders under their import name
.PHONY: typing
typing:
	mkdir -p build/typing/penstock
	ln -sfn ../../../launch/api/__init__.py build/typing/penstock/__init__.py
	for folder in $(PACKAGES); do ln -sfn ../../../$$folder build/typing/penstock/$$folder; done

clean:
	rm -rf $(VENV) build *.egg-info
