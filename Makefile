# The README's two commands are `make test` and `make race`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: test test-faults check race docs clean

test: $(VENV)/installed ## install, lint, type-check, run every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-faults: $(VENV)/installed ## every fault of docs/reliability.md, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m faults tests

check: test

race: $(VENV)/lab ## race seven optimizers on a small GPT; a table and an HTML report
	$(BIN)/mars race

docs: $(VENV)/installed ## build the documentation site into site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What a race needs; the rest is for tests and the site, and much larger.
$(VENV)/lab: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch setuptools
	$(INSTALL) --no-build-isolation -e '.[lab]'
	touch $@

$(VENV)/installed: $(VENV)/lab
	$(INSTALL) --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
