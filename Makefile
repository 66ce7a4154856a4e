# make demo   set up .venv and run the main job
# make test   set up .venv, then lint, types and tests
# make slow   the tests on the real model: calibrate, export, the same tokens, distill and train for a few steps
# make clean  remove everything that make made
#
# PYTHON=python3.12 picks the interpreter; PIP_ARGS passes options on to pip, for example torch's CPU index:
#   make demo PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
BUILTIN := smollm2-135m-instruct

.PHONY: setup demo test slow lint types model clean

setup: $(STAMP)

# Again only when the requirements or the native sources change.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard runtime/native/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "error: elsi-edge needs Python 3.11 or newer, $(PYTHON) is %d.%d; set PYTHON=" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[build,dev,docs]'
	@touch $@

demo: setup
	$(BIN)/elsi-edge demo

# A file's tests share what is costly to make, so they stay in one process; JOBS=1 runs them one after another.
JOBS ?= 2
test: lint types model
	$(BIN)/python -m pytest -q --numprocesses $(JOBS) --dist loadfile

slow: model
	$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy looks for packages by folder: lay them out as they install.
types: setup
	@rm -rf .typecheck && mkdir .typecheck
	@cp -Rp elsi_edge .typecheck/ && cp -Rp calibration export runtime .typecheck/elsi_edge/
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache elsi_edge ../tests

# The tests of the real model want it in the cache.
model: setup
	@$(BIN)/python -c 'import elsi_edge.models; elsi_edge.models.resolve("$(BUILTIN)")'

clean:
	rm -rf .venv .typecheck build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
