# Everything runs in a virtual environment in the clone, made on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: install demo test test-slow lint clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Entasis needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	@$(BIN)/entasis prepare web-bible --tokenizer bpe:1024 --held-out 0.05 --out data/web-bible --if-missing
	@$(BIN)/entasis compare configs/demo.yaml

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not slow' -n 2

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
