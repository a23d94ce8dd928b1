# One virtual environment, made once and again whenever pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help demo install test test-all lint types clean

help:
	@echo "make demo      install, then train a tiny FLAVA on drawn pictures (about a minute on two cores)"
	@echo "make test      install what the tests need and run them (make test-all: the long ones too)"
	@echo "make lint      ruff, format and rules        make types    mypy"
	@echo "make clean     remove the virtual environment"

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

install: $(VENV)/installed

demo: install
	$(BIN)/python -m flava_tnt.recipes.run demo

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
