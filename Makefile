# Every target installs what it needs into .venv, and does so only once per change of the pins.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e

.DEFAULT_GOAL := help
.PHONY: help quickstart test check docs clean

help:
	@echo "make quickstart   install, train three networks on one size, test them on 17, in minutes"
	@echo "make test         install, run the tests"
	@echo "make check        install, lint, check the formatting and the types"
	@echo "make docs         install, build the documentation in site/"
	@echo "make clean        remove .venv and what the tools left behind"

.venv/.base: pyproject.toml constraints.txt
	@echo "Setting up .venv (once; a few minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(INSTALL) .
	@touch $@

.venv/.dev: .venv/.base
	@echo "Adding the development tools to .venv (once; a few minutes) ..."
	@$(INSTALL) '.[dev]'
	@touch $@

quickstart: .venv/.base
	@$(BIN)/foveate quickstart --out quickstart

test: .venv/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup

check: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: .venv/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis quickstart site
