.POSIX:
.PHONY: setup demo test quick check pytest examples docs package test-pythons release test-gpu test-integrations test-gin test-oldest-triton smoke-gpu bench-peers mutants clean

PYTHON = python3
BIN = .venv/bin
STAMP = .venv/.installed
# Where setup gets torch without a GPU: the URL of a package index of CPU builds, as in
# make setup TORCH_INDEX=URL. Empty: pip's own configuration; the usual index has CUDA builds.
TORCH_INDEX =
# Ranks that wait for one another, and processes that start, leave time: four processes that run tests keep two cores
# busy, and are a fifth quicker than two.
# Bytecode is kept, even where the environment says otherwise: each of them imports the same tests, and dozens of
# programs the package. The processor time of all of them is printed at the end.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.processor_time $(BIN)/python -m pytest -n 4 --dist worksteal

setup: $(STAMP)

# Where there is an NVIDIA GPU and a torch that works, that torch is used. Elsewhere torch goes first and by its exact
# version, so that what is installed after it keeps it. A CPU build brings no Triton, a CUDA build the one that it
# was made for.
$(STAMP): pyproject.toml
	@if command -v nvidia-smi >/dev/null 2>&1 && $(PYTHON) -c 'import torch' 2>/dev/null; then \
		test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages .venv; \
	else \
		test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
		$(BIN)/python -m pip install --quiet $(TORCH_INDEX:%=--index-url %) torch==2.13.0 && \
		{ $(BIN)/python -c 'import importlib.metadata; importlib.metadata.version("triton")' 2>/dev/null || \
			$(BIN)/python -m pip install --quiet triton==3.9.0; }; \
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

pytest: setup
	$(PYTEST)

# Both at the same time: either fails the run.
test: setup
	@$(MAKE) -j 2 check pytest

quick: setup
	@$(MAKE) -j 2 check PYTEST="$(PYTEST) -m quick" pytest

examples: setup
	$(PYTEST) tests/test_examples.py

# The site in build/site: notebooks and slow programs of the pages run first, as the site shows what they print;
# then every warning and every link that leads nowhere is an error.
DOCS_STAMP = .venv/.documents-installed

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $(DOCS_STAMP)

# The variable silences the theme's advertisement of its successor.
docs: setup $(DOCS_STAMP)
	$(PYTEST) -m documents tests/test_notebooks.py tests/test_code_blocks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m tests.site build/site

# The sources and the wheel of them in dist, a check of what is in the wheel, and its commands in an environment of
# its own.
package: setup
	rm -rf dist
	$(BIN)/python -m pip install --quiet 'build>=1.2'
	$(BIN)/python -m build --outdir dist . >/dev/null
	$(BIN)/python -m tests.package dist/*.whl

# The wheel with Pythons that the tests do not run: all modules are imported, and its commands run, each beside a
# PyTorch of its own from the index, which takes minutes, and 5.4 GB for as long as it runs.
PYTHONS = 3.12 3.13

test-pythons: package
	$(BIN)/python -m tests.pythons dist/*.whl $(PYTHONS)

# The steps of docs/releasing.md from the checks of the tree to the upload, which a person does:
# make release VERSION=0.3.0
VERSION =

release: setup
	$(BIN)/python -m tests.release $(VERSION)
	@$(MAKE) package
	$(BIN)/python -m pip install --quiet 'twine>=6.1' 'readme-renderer[md]'
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.release $(VERSION) --built

# First what compiles many kernels, in several processes at the same time; then what needs the GPUs for itself.
test-gpu: setup
	$(BIN)/python -m pytest tests/gpu -m 'gpu and not alone' -n 12 --dist worksteal
	$(BIN)/python -m pytest tests/gpu -m 'gpu and alone'

# Programs that people run, from the package index: make test passes over those that are absent.
# FBGEMM's libraries fit one version of PyTorch, here that of setup. TorchRec and torchtitan go without
# what they ask for beside, which would be another PyTorch and much that is not used.
TORCHREC = torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics lightning-utilities pyre-extensions \
	typing-inspect mypy-extensions iopath portalocker pyvers cloudpickle
TORCHTITAN = torchtitan==0.3.0 spmd-types==0.2.3 torchdata tyro docstring-parser typeguard tomli

test-integrations: setup
	@{ $(BIN)/python -m pip install --quiet --editable '.[test,integrations]' && \
		$(BIN)/python -m pip install --quiet --no-deps $(TORCHREC) $(TORCHTITAN); } || { \
		echo 'make test-integrations: the package index cannot be reached, or has not these packages.' \
			'Run it again.' >&2; exit 1; }
	$(PYTEST) tests/integrations -m 'not gpu'

# GPU-initiated puts are compiled with the device code of NCCL's wheel, 216 MB, which is kept outside of the tree; no
# GPU runs them.
NCCL = nvidia-nccl-cu13==2.30.7
NCCL_CACHE = $${XDG_CACHE_HOME:-$$HOME/.cache}/interlace/$(NCCL)

test-gin: setup
	@test -e "$(NCCL_CACHE)/nvidia/nccl/lib/libnccl_device.bc" || \
		$(BIN)/python -m pip install --quiet --no-deps --no-compile --target "$(NCCL_CACHE)" $(NCCL)
	INTERLACE_NCCL="$(NCCL_CACHE)/nvidia/nccl" $(BIN)/python -m pytest -n 2 --dist worksteal tests/gin/test_nccl.py \
		tests/gin/test_compiled.py

# Every kernel is compiled by the oldest Triton that the package allows, too, 190 MB, kept where NCCL's wheel is:
# it refuses some programs that later ones compile. Not for AMD's GPUs, where it compiles no compare-and-swap of a tile
# of 64-bit elements. Its interpreter is another one, too.
OLDEST_TRITON = triton==3.6.0
OLDEST_TRITON_CACHE = $${XDG_CACHE_HOME:-$$HOME/.cache}/interlace/$(OLDEST_TRITON)

test-oldest-triton: setup
	@test -e "$(OLDEST_TRITON_CACHE)/triton/__init__.py" || \
		$(BIN)/python -m pip install --quiet --no-deps --no-compile --target "$(OLDEST_TRITON_CACHE)" $(OLDEST_TRITON)
	PYTHONPATH="$(OLDEST_TRITON_CACHE)" $(BIN)/python -m pytest -n 2 tests/test_compile_targets.py tests/comm/test_kernel_folder.py -k "not gfx942"
	PYTHONPATH="$(OLDEST_TRITON_CACHE)" $(BIN)/python -m pytest -n 2 tests/language tests/mapped tests/operators

smoke-gpu: setup
	$(BIN)/python -m pytest tests/gpu -m 'gpu and smoke'

# Peers beside Interlace on two GPUs: benchmarks/peers/README.md has how they are installed. In PEERS go options, as in
# make bench-peers PEERS='--only QuACK --path FOLDER'.
PEERS =
PEERS_JSON = benchmarks/results/$$(date +%F)-peers.json

bench-peers: setup
	$(BIN)/python -m benchmarks.peers --json $(PEERS_JSON) $(PEERS)

# Some 70 mistakes, one after another, each in a copy of the tree: a test must notice each of them.
mutants: setup
	$(BIN)/python -m tests.mutation

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
