# make demo       sets everything up, exports a real model and runs it inside a fixed KV budget
# make test       sets everything up and runs the tests (under 15 minutes on two cores)
# make test-slow  the long checks as well
# make test-tensorrt  the TensorRT tests with NVIDIA's own parser, builder and registries (no GPU needed; needs nvcc)
# make plugin     builds the TensorRT plugin library with nvcc
# make soak       100,000 tokens in one run: memory flat to the byte, speed flat
#
# Needs Linux, Python 3.10 to 3.12 with venv, g++ and a network. Everything lands in .venv, .cache and bundles; every step can be
# interrupted and repeated.
PYTHON ?= python3
TORCH  ?= 2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
GGUF   := .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO   := bundles/smollm2-demo
# about 1,800 tokens and a question behind them, in a cache of 350
TEXT := head -c 8000 edgekv/quality/persuasion.txt
QUESTION := "Thank you for this long text. Now please write a short story about a lighthouse keeper."
SOURCES := $(shell find plugins setup.py -name '*.cpp' -o -name '*.h' -o -name '*.def' -o -name '*.cuh' -o -name setup.py 2>/dev/null)

# one process per processor, each kept on its own (tests/conftest.py); four at most, because those of the exporter take a gigabyte
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist worksteal

.PHONY: demo test test-slow test-tensorrt plugin soak setup clean
.DELETE_ON_ERROR:

demo: $(DEMO)/manifest.json
	$(BIN)/edgekv inspect $(DEMO)
	@echo
	{ $(TEXT); echo; echo $(QUESTION); } | $(BIN)/edgekv run $(DEMO) --chat --prompt-file /dev/stdin --max-tokens 160 \
	  --repetition-penalty 1.1

test: setup $(GGUF)
	$(PYTEST) -m "not slow"

test-slow: setup $(GGUF)
	$(PYTEST)

test-tensorrt: setup $(GGUF)
	$(BIN)/python tools/tensorrt_wheels.py
	EDGEKV_TENSORRT_TESTS=1 $(BIN)/python -m pytest -q tests/tensorrt/wheels

plugin: setup
	$(BIN)/python tools/build_plugin.py

soak: $(DEMO)/manifest.json
	$(BIN)/python tools/soak.py $(DEMO)

setup: $(VENV)/.installed $(VENV)/.built

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' \
	  || { echo "edgekv needs Python 3.10 to 3.12; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python tools/install_torch.py $(TORCH)
	@echo "installing edgekv and what it needs into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install -qq --editable '.[export,test]'
	@touch $@ $(VENV)/.built

# The editable install has built the library; this keeps it up to date with its sources.
$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(GGUF): | $(VENV)/.installed
	$(BIN)/python tools/fetch_smollm2.py $(dir $@) >/dev/null

$(DEMO)/manifest.json: $(GGUF) | setup
	$(BIN)/edgekv export $(GGUF) -o $(DEMO) --force --weights int4 --keep window --positions cache --kv-budget 8MiB
	@touch $@

clean:
	rm -rf build bundles .cache edgekv/_native edgekv.egg-info $(VENV)
