# Every target sets up what it needs in .venv, and does that only once per change of the pins.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help quickstart test check clean

help:
	@echo "make quickstart   install, make a small data set and look at it"
	@echo "make test         install, run the tests"
	@echo "make check        install, lint, check the formatting and the types"
	@echo "make clean        remove .venv and what the tools left behind"

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (once; a few minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(READY)
	@$(BIN)/foveate generate mnist-large-scale --source mnist-5k --train none --test 1,2,4 --out quickstart
	@$(BIN)/foveate show mnist-5k --out quickstart/digits.png

test: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis quickstart
