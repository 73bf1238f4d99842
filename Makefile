# Every target installs its dependencies into .venv, again only after pyproject.toml or constraints.txt changed.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e

.DEFAULT_GOAL := help
.PHONY: help quickstart test check docs clean

help:
	@echo "make quickstart   train three networks at one scale and test them at 17 scales, in minutes"
	@echo "make test         run the tests"
	@echo "make check        run the linter, the format check and the type checker"
	@echo "make docs         build the documentation in site/"
	@echo "make clean        remove .venv, caches and built files"
	@echo "The first use of a target installs its dependencies into .venv."

.venv/.base: pyproject.toml constraints.txt
	@echo "Setting up .venv (once; a few minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(INSTALL) .
	@touch $@

.venv/.dev: .venv/.base
	@echo "Installing the development tools into .venv (once; a few minutes) ..."
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
