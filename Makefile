# Everything starts here: each target works from a bare clone with Python 3.11, make and gcc, and installs what it needs.

VENV := .venv
# Everything, and what a text job with its report and the board takes: the two that can be installed.
STAMP := $(VENV)/.installed
MAIN := $(VENV)/.main
MAIN_EXTRAS := report,board
BROWSER := $(VENV)/.browser
BIN := $(VENV)/bin
ARGS ?=

# The first of these that really runs and is new enough; PYTHON=/path/to/python overrides.
CANDIDATES := python3.11 python3.12 python3.13 python3 python
IS_NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in $(CANDIDATES); do \
	$$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)

# Processes of a launcher: one per GPU, or one on a CPU. `make train-accelerate PROCESSES=2` starts two.
PROCESSES ?=

# Tests run in so many processes, a file of tests in one of them; `make test WORKERS=0` runs them in one.
WORKERS ?= 2

# What tests write lies in memory where that has 8 GiB for it: every save waits for the disk otherwise.
test test-fast test-cpu test-gpu coverage: export TMPDIR ?= $(shell grep -qs ' /dev/shm .*noexec' /proc/mounts || \
	df -k /dev/shm 2>/dev/null | awk '$$6 == "/dev/shm" && $$4 > 8388608 { print $$6 }')

# One training by the command per task.
TRAININGS := tests/cli/test_train.py::test_a_run_writes_what_the_contract_promises \
	'tests/cli/test_recipes.py::test_a_recipe_of_another_task_trains[resnet.yaml]' \
	tests/train/test_words.py::test_the_command_trains_with_all_loops \
	tests/train/test_sensors.py::test_the_command_trains_and_writes_a_run

# Tests for while one works: rooms that train nothing, and the trainings above.
FAST := tests/control tests/hardware --ignore=tests/hardware/test_heap.py tests/report \
	$(patsubst %,tests/test_%.py,docs import_arrows run_files safe_paths secrets settings) \
	$(patsubst %,tests/data/test_%.py,collate encode images numbered odd_files packing samplers sensors) \
	$(patsubst %,tests/data/test_%.py,sources store stream tokenizer) \
	$(patsubst %,tests/runs/test_%.py,budget comparison_plan launch process queue state variants) \
	$(TRAININGS)

# What shows that a machine without a GPU trains: a few steps of every task, and of every way to use less memory.
SMOKE := $(TRAININGS) tests/cli/test_recipes.py::test_a_recipe_trains \
	$(patsubst %,tests/train/test_sensors.py::test_%,all_branches_train_by_the_command \
	the_command_learns_reports_and_tells_how_well qlora_over_random_weights_trains_all_but_the_packed_blocks) \
	$(patsubst %,tests/train/test_sensors_placed.py::test_%,a_model_that_fits_is_trained_the_same_with_a_device_map \
	adapters_over_weights_on_disk_are_adapters_over_weights_in_memory deepspeed_trains_what_plain_python_trains)

# Tokenizers warn once per fork otherwise; data loading forks after tokenizing.
export TOKENIZERS_PARALLELISM = false
# Programs that are started again and again are compiled once.
unexport PYTHONDONTWRITEBYTECODE
# Operators that DeepSpeed compiles go with the environment that they were compiled for.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions

.DEFAULT_GOAL := help
.PHONY: help deps verify-install plan background check-gpu monitor-memory train train-cpu train-accelerate train-deepspeed train-qlora train-device-map train-resnet train-efficientnet train-gru train-sensors train-sensors-deepspeed train-sensors-device-map train-sensors-qlora compare regressions test test-fast test-cpu test-gpu test-smoke coverage docs lint

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-25s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: $(STAMP) ## install everything into .venv, once; the other targets install what they need by themselves

verify-install: $(MAIN) ## check Python, packages, memory and disk, and say what to do about each gap
	$(BIN)/scu-trainer train --check_requirements $(ARGS)

plan: $(MAIN) ## predicted peak memory of recipes/scu_lora.yaml, and settings that fit; ARGS='--gpu "RTX 3050 4GB"'
	@$(BIN)/scu-trainer plan --config recipes/scu_lora.yaml $(ARGS)

background: $(STAMP) ## background runs: a menu; ARGS="start --config recipes/resnet.yaml", "list", "status", ...
	@$(BIN)/scu-trainer runs $(ARGS)

check-gpu: $(MAIN) ## say which GPUs torch can use, what they can do, or why there is none
	@$(BIN)/scu-trainer hardware check --gpu $(ARGS)

monitor-memory: $(MAIN) ## memory of this machine and its GPUs, live; ARGS="--duration 60" ends by itself
	@$(BIN)/scu-trainer hardware monitor $(ARGS)

train: $(MAIN) ## fine-tune with recipes/scu_lora.yaml; ARGS="--max_steps 20" adds flags
	$(BIN)/python scripts/train.py --config recipes/scu_lora.yaml $(ARGS)

train-cpu: $(MAIN) ## the same on the CPU, also where there is a GPU
	$(BIN)/python scripts/train.py --config recipes/scu_lora.yaml --use_cpu true $(ARGS)

train-accelerate: $(MAIN) ## one process per GPU, or two on a CPU, started by accelerate
	$(BIN)/scu-trainer launch accelerate --processes '$(PROCESSES)' --config recipes/scu_lora.yaml $(ARGS)

train-deepspeed: $(STAMP) ## ZeRO-2 with the optimizer in main memory, started by deepspeed; all weights are trained
	$(BIN)/scu-trainer launch deepspeed --processes '$(PROCESSES)' --config recipes/deepspeed.yaml $(ARGS)

train-qlora: $(STAMP) ## adapters over weights stored in 4 bits
	$(BIN)/python scripts/train.py --config recipes/qlora.yaml $(ARGS)

train-device-map: $(MAIN) ## adapters over weights that lie on GPU, main memory and disk
	$(BIN)/python scripts/train.py --config recipes/device_map.yaml $(ARGS)

train-resnet: $(STAMP) ## an image classifier (ResNet-18) on scikit-learn's digits
	$(BIN)/python scripts/train.py --config recipes/resnet.yaml $(ARGS)

train-efficientnet: $(STAMP) ## EfficientNet-B0 on the same images
	$(BIN)/python scripts/train.py --config recipes/efficientnet.yaml $(ARGS)

train-gru: $(MAIN) ## CADENCE, a GRU language model over words and their category, on Python's documentation
	$(BIN)/python scripts/train.py --config recipes/gru.yaml $(ARGS)

train-sensors: $(MAIN) ## TRIDENT, a classifier of video, infrared and motion, on generated recordings
	$(BIN)/python scripts/train.py --config recipes/sensors.yaml $(ARGS)

train-sensors-deepspeed: $(STAMP) ## the same with ZeRO-2 and the optimizer in main memory, started by deepspeed; ARGS="--max_steps 5" is a look
	$(BIN)/scu-trainer launch deepspeed --processes '$(PROCESSES)' --config recipes/sensors.yaml --deepspeed ds_configs/zero2_offload.json --output_dir runs/sensors_deepspeed $(ARGS)

train-sensors-device-map: $(MAIN) ## the same with its weights spread over the GPUs of one process (and, for adapters, main memory and disk)
	$(BIN)/python scripts/train.py --config recipes/sensors.yaml --device_map auto --output_dir runs/sensors_device_map $(ARGS)

train-sensors-qlora: $(STAMP) ## the same with transformer blocks in 4 bits beside adapters, all else in full precision and trained
	$(BIN)/python scripts/train.py --config recipes/sensors.yaml --tuning qlora --output_dir runs/sensors_qlora $(ARGS)

compare: $(STAMP) ## controllers against each other on embedded data, equal tokens, 3 seeds: table and verdict (see docs/compare.md)
	$(BIN)/python scripts/compare_controllers.py --config recipes/compare.yaml --output_dir runs/compare $(ARGS)

regressions: $(STAMP) ## run benchmarks again and say what moved since their results; ARGS="overhead startup"
	$(BIN)/python benchmarks/headline/regressions.py $(ARGS)

test: $(STAMP) $(BROWSER) ## run the tests; ARGS="-k resume" adds pytest flags
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-fast: $(STAMP) $(BROWSER) ## less than a minute: rooms that train nothing, and one training by the command per task
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(FAST) $(ARGS)

test-cpu: $(STAMP) ## about a minute: a few steps of every task on the CPU, also where there is a GPU
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(SMOKE) $(ARGS)

test-gpu: $(STAMP) ## on a CUDA card, one alone (CUDA_VISIBLE_DEVICES=1 chooses another): what only a card shows
	CUDA_VISIBLE_DEVICES=$(or $(CUDA_VISIBLE_DEVICES),0) $(BIN)/python -m pytest tests/gpu $(ARGS)

test-smoke: $(STAMP) ## every memory-efficient path for a few real steps: peak memory, step time, loss (about 10 minutes)
	$(BIN)/scu-trainer variants $(ARGS)

coverage: $(STAMP) $(BROWSER) ## run the tests, and list the lines of the package that none of them reaches
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --cov=scu_trainer --cov-report=term-missing $(ARGS)

docs: $(STAMP) ## the documentation as a site, in site/; strict: a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)

lint: $(STAMP) ## check style and formatting with ruff, types with mypy, and the English of pages and messages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/english/check.py

# The stamp is the last thing written, so an interrupted install is taken up again by the next call.
# DS_BUILD_OPS=0: DeepSpeed compiles an operator when a run first needs it, never at install.
define INSTALL
	@'$(PYTHON)' -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { \
		echo "scu-trainer needs Python 3.11 or newer with the venv module (found: '$(PYTHON)'); install it or pass PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@rm -f $@
	'$(PYTHON)' -m venv $(VENV)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -e '.[$(1)]' -c constraints.txt
endef

$(MAIN): setup.cfg pyproject.toml constraints.txt
	$(call INSTALL,$(MAIN_EXTRAS))
	@touch $@

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(call INSTALL,all)
	@touch $@ $(MAIN)

# Reports are opened in a real browser by the tests: one that is there, or Debian's.
$(BROWSER): tests/find_browser.sh
	@sh tests/find_browser.sh
	@touch $@
