# Each target sets up what it needs: a virtual environment, the dependencies and the native build.
PYTHON ?= python3
VENV ?= .venv
# Many tests wait for a command of their own; two at a time keep two cores busy.
PYTEST_ARGS ?= -n 2 --dist loadfile
BIN := $(VENV)/bin

SOURCES := pyproject.toml setup.py $(wildcard src/deltafin/kernels/native/*)

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	@$(BIN)/deltafin demo

test: $(VENV)/.tested
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.tested
	$(BIN)/python -m benchmarks

# Copies and links are tried by the environment module itself; pip prints its own progress.
$(VENV)/bin/python:
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("Deltafin needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@echo "installing Deltafin and building its kernels (PyTorch is a large download the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install --disable-pip-version-check --editable '.[test,lint]'
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
	find src -name '*.so' -delete
