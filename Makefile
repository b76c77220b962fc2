# Everything starts here: `make train` and `make test` work from a bare clone with Python 3.11, make and gcc.

VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
ARGS ?=

# The first of these that really runs and is new enough; PYTHON=/path/to/python overrides.
CANDIDATES := python3.11 python3.12 python3.13 python3 python
IS_NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in $(CANDIDATES); do \
	$$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)

# Tokenizers warn once per fork otherwise; data loading forks after tokenizing.
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help deps verify-install train test lint

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: $(STAMP) ## install everything into .venv, once (about 2 minutes)

verify-install: $(STAMP) ## check Python, packages, memory and disk, and say what to do about each gap
	$(BIN)/scu-trainer train --check_requirements $(ARGS)

train: $(STAMP) ## fine-tune with recipes/scu_lora.yaml; ARGS="--max_steps 20" adds flags
	$(BIN)/python scripts/train.py --config recipes/scu_lora.yaml $(ARGS)

test: $(STAMP) ## run the tests; ARGS="-k resume" adds pytest flags
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## check style and formatting with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The stamp is the last thing written, so an interrupted install is taken up again by the next call.
# DS_BUILD_OPS=0: DeepSpeed compiles an operator when a run first needs it, never at install.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@'$(PYTHON)' -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { \
		echo "scu-trainer needs Python 3.11 or newer with the venv module (found: '$(PYTHON)'); install it or pass PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@rm -f $@
	'$(PYTHON)' -m venv $(VENV)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -e '.[all]' -c constraints.txt
	@touch $@
