# `make demo` grows eight small networks that were trained before; `make test` runs the tests; `make test-third-party` runs those
# with other packages; `make docs` builds the documentation into site/. Each makes a virtual environment first.

PYTHON ?= python3
VENV ?= .venv

# One thread a process: the arrays are small, and sums then come in one order.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-third-party docs install install-dev install-third-party install-docs

demo: install
	$(VENV)/bin/esper grow spirals-trained --envs 8 --controller heuristic --run runs/demo --overwrite

test: install-dev
	$(VENV)/bin/python -m pytest -n 2

test-third-party: install-third-party
	$(VENV)/bin/python -m pytest -m third_party tests/third_party

docs: install-docs
	$(VENV)/bin/mkdocs build --strict --quiet

install: $(VENV)/installed

install-dev: $(VENV)/installed-dev

install-third-party: $(VENV)/installed-third-party

install-docs: $(VENV)/installed-docs

# The packages are editable, so only a change of what they need calls for another installation.
$(VENV)/installed: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/installed

$(VENV)/installed-third-party: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev,hf,lightning]'
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@ $(VENV)/installed
