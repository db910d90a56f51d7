# make quickstart: train, evaluate, translate and look at a model, from nothing.   make test: the whole test suite.
# Both create the environment in .venv first, once. Other commands: make check (linters and types), make soak (crash tests
# that take minutes), make clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: quickstart test soak conformance check format clean

quickstart: $(INSTALLED)
	$(BIN)/python scripts/quickstart.py

test: $(INSTALLED)
	$(BIN)/python -m pytest

soak: $(INSTALLED)
	$(BIN)/python -m pytest -m soak

conformance: $(INSTALLED)
	$(BIN)/python scripts/conformance/run.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist runs modeling/*.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Heed needs Python 3.11 or newer.')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(INSTALLED)
