.POSIX:
.PHONY: setup demo test check examples test-gpu clean

PYTHON = python3
BIN = .venv/bin
STAMP = .venv/.installed

setup: $(STAMP)

# Where there is an NVIDIA GPU and a torch that works, that torch is used. Elsewhere torch goes first and by its exact
# version: any other way resolves to a CUDA build of several gigabytes.
$(STAMP): pyproject.toml
	@if command -v nvidia-smi >/dev/null 2>&1 && $(PYTHON) -c 'import torch' 2>/dev/null; then \
		test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages .venv; \
	else \
		test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
		$(BIN)/python -m pip install --quiet torch==2.13.0 && \
		$(BIN)/python -m pip install --quiet triton==3.9.0; \
	fi
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@# Only its schema is used: what it asks for beside that is a notebook server with a hundred packages.
	$(BIN)/python -m pip install --quiet --no-deps 'mlc-chakra>=1.0'
	@touch $(STAMP)

demo: setup
	$(BIN)/interlace demo

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest
	@$(MAKE) examples

# Every example ends by checking its own result.
examples: setup
	@set -e; for example in examples/*.py; do \
		test -e "$$example" || continue; \
		echo "$$example"; $(BIN)/python "$$example" > /dev/null; \
	done

test-gpu: setup
	$(BIN)/python -m pytest -m gpu tests/gpu

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
