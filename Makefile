# make demo   see it work          make test   every check that needs no GPU
PYTHON ?= python3

VENV  := .venv
BIN   := $(VENV)/bin
# Newer than pyproject.toml and constraints.txt once the environment matches them: STAMP for the package with its tools,
# TESTS for what its tests need beside (the kernel compiler, Transformers, linters), which is most of the download.
# timm has a folder of its own: a torchvision that does not fit torch breaks Transformers, and only timm's test needs it.
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.installed-for-tests
PIP   := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help env demo test lint types gpu-test report clean distclean

help:
	@echo "make demo       run attention under every policy, print the table, write report.html"
	@echo "make test       lint, types and the CPU tests (kernels are compiled, and run in an interpreter)"
	@echo "make lint       ruff check and ruff format --check"
	@echo "make types      mypy"
	@echo "make gpu-test   the tests that need a Hopper GPU"
	@echo "make report     one web page of the committed measurements: measured.html"
	@echo "make env        create or update $(VENV) and nothing else"
	@echo "make clean      remove caches and outputs (distclean: $(VENV) too)"
	@echo "PYTHON=...      the Python (3.10 or later) that $(VENV) is made with, now $(PYTHON)"

env: $(TESTS)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "dash_attn needs Python 3.10 or later; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Installing dash-attn, its tools and their pinned dependencies into $(VENV): a minute or two the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[tools]'
	@touch $@

$(TESTS): $(STAMP)
	@echo "Installing what the tests need: another minute or two the first time."
	@$(PIP) -e '.[tools,dev,hf,recipes]'
	@$(PIP) --upgrade --no-deps --target $(VENV)/timm timm torchvision
	@touch $@

demo: $(STAMP)
	@$(BIN)/dash-attn demo

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTS)
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -n 2 -rs

gpu-test: $(TESTS)
	$(BIN)/python -m pytest -m "gpu and not alone" -n 8 --dist worksteal -rs
	$(BIN)/python -m pytest -m "gpu and alone"

report: $(STAMP)
	@benchmarks/report measured.html

clean:
	rm -rf build dist *.egg-info report.html measured.html figures .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dash_attn tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
