# Every target sets up what it needs in .venv, and does that only once per change of the pins.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help quickstart test check docs clean

help:
	@echo "make quickstart   install, train three networks on one size, test them on 17, in minutes"
	@echo "make test         install, run the tests"
	@echo "make check        install, lint, check the formatting and the types"
	@echo "make docs         install, build the documentation in site/"
	@echo "make clean        remove .venv and what the tools left behind"

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (once; a few minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(READY)
	@$(BIN)/foveate quickstart --out quickstart

test: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis quickstart site
