# Needs Python 3.11 or later, git and make. Everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint protos install clean

demo: $(STAMP)  ## three daemons on this machine run a model that each of them could not hold alone
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p p2pshard
	$(BIN)/mypy -p p2pshard_node
	$(BIN)/lint-imports
	PYTHON=$(BIN)/python protos/generate.sh
	git diff --exit-code -- p2pshard/transport/generated

protos: $(STAMP)
	PYTHON=$(BIN)/python protos/generate.sh

install: $(STAMP)

# PIP_EXTRA_INDEX_URL and the other settings of pip apply; see "CPU-only PyTorch" in README.md.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "p2pshard needs Python 3.11 or later; $(PYTHON) is older. Name another: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[node,dev]'
	@touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
