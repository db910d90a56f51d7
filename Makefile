# make quickstart: train, evaluate, translate and look at a model, from nothing.   make test: the tests.
# Both create the environment in .venv first, once; the quickstart's has only what it uses. Other commands: make test-all
# (the slow tests too, before a release), make release (the files for an index, in dist/, tried in fresh environments),
# make site (the documentation as a site, in site/), make check (linters, types, prose, sizes of files), make bench (benchmarks on the CPU,
# figures in runs/benchmarks), make gpu (all that needs a graphics card, which the tests leave alone: checks and
# benchmarks), make oldest and make newest (the tests with the oldest libraries, in .venv-oldest, and with today's newest,
# in .venv-newest), make machines (the tests as other processors compute them), make clean. VENV=.venv-oldest runs any of them with the oldest libraries.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
DEVELOPED := $(VENV)/developed
# Each process of the tests computes on one core and takes up to 3 GB.
PYTEST := -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile
QUICK := tests/data tests/evaluation tests/house tests/decoding tests/attention tests/distillation tests/model tests/model_rnn
QUICK += $(foreach kind,guide training adapters compilation recipes offload attention strategies korean denoising forms like_any,--ignore-glob='*$(kind)*.py')
INSTALL = python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt
BENCHMARK := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python scripts/benchmarks

.PHONY: quickstart quick test test-all oldest oldest-fast newest machines conformance bench gpu site release check format tables clean

quickstart: $(INSTALLED)
	$(BIN)/python scripts/quickstart.py

test: $(DEVELOPED)
	$(BIN)/python $(PYTEST)

# What starts no process and trains nothing, for the loop of writing.
quick: $(DEVELOPED)
	$(BIN)/python $(PYTEST) -m "not slow and not multiprocess" $(QUICK)

test-all: $(DEVELOPED)
	$(BIN)/python $(PYTEST) -m ""

# The newest environment too: what one of them saves is read in the other.
oldest: .venv-oldest/developed .venv/developed
	.venv-oldest/bin/python $(PYTEST)

# A quarter of the time, and what depends on transformers the most.
oldest-fast: .venv-oldest/developed
	.venv-oldest/bin/python $(PYTEST) tests/model tests/model_rnn tests/decoding tests/attention tests/distillation tests/pipeline tests/house/test_versions.py

# As a stranger installs it today: from the index, without constraints.
newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager ".[dev,all]"
	.venv-newest/bin/python scripts/upkeep/newest.py

# The tests as other processors would compute them. ONLY="avx2" tries one alone, ONLY=quick the fast part of two.
machines: $(DEVELOPED)
	$(BIN)/python scripts/upkeep/machines.py $(if $(filter quick,$(ONLY)),--quick,$(if $(ONLY),--only "$(ONLY)"))

conformance: $(DEVELOPED)
	$(BIN)/python scripts/conformance/run.py

# One after the other: they would disturb each other.
bench: $(DEVELOPED)
	mkdir -p runs/benchmarks
	$(BENCHMARK)/startup.py --rounds 5 --json runs/benchmarks/startup.json
	$(BENCHMARK)/memory.py --json runs/benchmarks/memory.json
	$(BENCHMARK)/train.py --rounds 3 --json runs/benchmarks/train.json
	$(BENCHMARK)/generate.py --rounds 2 --json runs/benchmarks/generate.json
	$(BENCHMARK)/batching.py --rounds 3 --json runs/benchmarks/batching.json
	$(BENCHMARK)/scale.py --sizes small --rounds 2 --json runs/benchmarks/scale.json
	$(BENCHMARK)/profiles.py --json runs/benchmarks/profiles.json

# Nine minutes; with Multi30k: GPU="--pairs path/to/multi30k".
gpu: $(INSTALLED)
	mkdir -p runs/benchmarks
	$(BIN)/python scripts/benchmarks/gpu.py --json runs/benchmarks/gpu.json $(GPU)

# Warnings are errors: a link that leads nowhere, a page that no reader finds.
site: $(DEVELOPED)
	$(BIN)/mkdocs build --strict

# ONLY="oldest newest" tries these alone.
release:
	test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check build twine
	.venv-release/bin/python scripts/upkeep/release.py $(if $(ONLY),--only $(ONLY))

check: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell *.md docs modeling scripts configuration .github skills
	$(BIN)/python scripts/upkeep/prose.py
	$(BIN)/python scripts/upkeep/sizes.py

# The tables of the docs that are read off the code.
tables: $(DEVELOPED)
	$(BIN)/python scripts/upkeep/recipe_keys.py --write
	$(BIN)/python scripts/upkeep/rooms.py --write
	$(BIN)/python scripts/upkeep/touched.py --write

format: $(DEVELOPED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-release build dist runs site modeling/*.egg-info

# What is pinned first is what holds, so that the oldest environment differs from the newest in constraints-oldest.txt alone.
.venv-oldest/installed: pyproject.toml constraints-oldest.txt constraints.txt
.venv/installed: pyproject.toml constraints.txt
.venv-oldest/installed .venv/installed:
	@$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Heedful needs Python 3.11 or newer.')"
	$(PYTHON) -m venv $(@D)
	awk -F== '!seen[$$1]++' $(filter %.txt,$^) > $(@D)/constraints.txt
	$(@D)/bin/$(INSTALL) torch
	$(@D)/bin/$(INSTALL) --editable ".[plots]"
	touch $@

.venv-oldest/developed .venv/developed: %/developed: %/installed
	$(@D)/bin/$(INSTALL) --editable ".[dev,all]"
	touch $@
