# Every target sets up what it needs on first use: a virtual environment in .venv with pinned versions.
#
#   make demo        calibrate, plan and a managed run that loses and gains VMs (two minutes)
#   make test        the tests, those with real processes included: what CI runs
#   make test-fast   tests without real worker processes, and without the slow ones of the others
#   make test-long   every test, including further variants of what a cheaper one checks; 10,000 random histories of the
#                    controller instead of 200, more random cases, more members and losses of elastic rings, and whole
#                    grids of cases
#   make test-times  what the tests of the last run took, in elapsed and processor time: the slowest, by folder and by
#                    process; TIMES=record stores the time of each file, which the next run uses to order them
#   make test-gpu    the tests that need a CUDA device: skipped, with the reason, where there is none
#   make bench-gpu   what a CUDA device takes: sums, copies, NCCL's forming and abort, whole steps beside a plain loop
#   make gpu-kit     dist/gpu-kit.tar: this tree and wheels, for tests and times on a GPU machine without a package registry
#   make test-scripts  the example scripts that transformers publishes, fetched from GitHub with the packages that they
#                    import; SCRIPTS_FROM: another URL, such as file:///folder
#   make test-trackers  TensorBoard, Weights & Biases and MLflow, installed for it: read back with their own readers
#   make test-slurm  a run on a real Slurm, whose packages it installs (Debian, as root)
#   make soak        runs under faults from outside, for SOAK_MINUTES (60), drawn from SEED;
#                    SOAK_STEPS=1000000: one run of so many cheap steps, with faults far apart; with SOAK_FOLDER
#                    in pieces of SOAK_MINUTES, each of which continues the one before
#   make check       lint, format, types, layers, lines by room, documentation: what CI runs first
#   make tutorial-output  the outputs in the tutorial and in README, written anew from one run of its commands
#   make docs        the documentation as a site in out/site, with every link and anchor checked
#
# TEST_WORKERS is how many tests run at once; 0: one after the other in one process, as plain `pytest` does.
# PYTHON picks the interpreter (3.11 or 3.12). TORCH_PIP_ARGS is handed to pip when torch is installed, for
# example TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu" for a build without CUDA.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
TORCH_PIP_ARGS ?=
TEST_WORKERS ?= auto
PYTEST_ARGS ?=
SOAK_MINUTES ?= 60
SEED ?=
SCRIPTS_FROM ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt

# Nothing here may reach out to a model hub, and one thread per process keeps CPU arithmetic comparable.
TEST_ENV := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 MPLBACKEND=Agg
# Hundreds of processes import the same files: byte code is kept, whatever the environment says.
TEST_ENV += PYTHONDONTWRITEBYTECODE=
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo tutorial-output test test-fast test-long test-times test-trackers test-slurm test-oldest-ray test-oldest-transformers test-oldest-lightning test-scripts test-gpu bench-gpu gpu-kit soak check lint types layers lines docs format clean
.PHONY: .packages .byte-code .first-plan
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

setup: $(READY)

# Torch comes first, so that a local wheel or the index named in TORCH_PIP_ARGS decides which build it is. Pip takes one
# core, so byte code is written beside it (what nobody imports here, or few, is left out), and a first plan then compiles
# the simulator's loops for all later.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x 'py312_|/tests/|/(pip|mypy|debugpy|transformers/models|torch/testing)/|/ray/(rllib|data|serve|tune|train|llm)/'
BESIDE := $(MAKE) --no-print-directory --jobs=2
FIRST_PLAN := $(BIN)/morph plan configs/profiles/bert-large.json --gpus 4

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no python3.11, python3.12 or python3 on PATH" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
		|| { echo "error: $(PYTHON) is not Python 3.11 or 3.12; name one with PYTHON=..." >&2; exit 1; }
	@echo "setting up $(VENV) (once)"
	"$(PYTHON)" -m venv $(VENV)
	$(PIP_INSTALL) $(TORCH_PIP_ARGS) torch==2.13.0
	@$(BESIDE) .packages .byte-code
	@$(BESIDE) .first-plan .byte-code
	@touch $@

.packages:
	$(PIP_INSTALL) --editable '.[dev,examples]'

.byte-code:
	@$(COMPILE) $(VENV)/lib morph calibrate simulator manager || true

.first-plan:
	@$(FIRST_PLAN) > /dev/null 2>&1 || $(FIRST_PLAN)

demo: $(READY)
	$(TEST_ENV) $(BIN)/morph demo

# Each process of pytest would rewrite the assertions of every test for itself where nobody has before.
tests/__pycache__: | $(READY)
	@$(TEST_ENV) $(BIN)/python -m pytest --collect-only --quiet > /dev/null || true

test: $(READY) tests/__pycache__
	$(PYTEST) -m "not long" --junitxml=out/tests.xml $(PYTEST_ARGS)

test-fast: $(READY) tests/__pycache__
	$(PYTEST) -m "not system and not slow and not long" $(PYTEST_ARGS)

# Without a network, the tests of the published scripts are skipped with a reason.
test-long: $(READY) tests/__pycache__ test-oldest-ray test-oldest-transformers test-oldest-lightning
	-@$(MAKE) --no-print-directory $(SCRIPTS)/packages
	MORPH_HISTORIES=10000 MORPH_EXPLORE=long $(PYTEST) $(PYTEST_ARGS)

# Installed is the newest of each range in pyproject.toml; the oldest is put before it on the path of the tests that concern
# it, with what it needs in other versions than those installed.
OLDEST_RAY := 2.55.0
OLDEST_TRANSFORMERS := 5.0.0
OLDEST_LIGHTNING := 2.5.0
OLD_RAY := $(VENV)/ray-$(OLDEST_RAY)/site-packages
OLD_TRANSFORMERS := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)/site-packages
OLD_LIGHTNING := $(VENV)/lightning-$(OLDEST_LIGHTNING)/site-packages
PIP_OLD = $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target

test-oldest-ray: $(READY) | $(OLD_RAY)
	PYTHONPATH=$(abspath $(OLD_RAY)) $(PYTEST) tests/system/test_vm_host.py \
		tests/system/test_silent_loss.py::test_a_run_on_ray_survives_broken_connections_silent_workers_and_a_revocation

# Grouped products of experts in float32 cannot be exported with the oldest, whatever exports them.
test-oldest-transformers: $(READY) | $(OLD_TRANSFORMERS)
	PYTHONPATH=$(abspath $(OLD_TRANSFORMERS)) $(PYTEST) -k "not mixtral and not routers" \
		tests/cutting/test_attention.py tests/cutting/test_models.py tests/trainers/test_trainer.py

test-oldest-lightning: $(READY) | $(OLD_LIGHTNING)
	PYTHONPATH=$(abspath $(OLD_LIGHTNING)) $(PYTEST) tests/trainers/test_lightning.py

SCRIPTS := $(VENV)/scripts

test-scripts: $(READY) $(SCRIPTS)/packages
	$(PYTEST) tests/trainers/test_published_scripts.py $(PYTEST_ARGS)

$(SCRIPTS)/packages: tests/trainers/published_scripts.yaml | $(READY)
	$(BIN)/python -m tests.trainers.published_scripts $(SCRIPTS) $(SCRIPTS_FROM)
	$(PIP_OLD) $@ --upgrade --no-compile $$(sed -n 's/^packages: .\(.*\)./\1/p' $< | tr -d ,)
	@touch $@

$(OLD_LIGHTNING): | $(READY)
	$(PIP_OLD) $@ pytorch-lightning==$(OLDEST_LIGHTNING)

$(OLD_RAY): | $(READY)
	$(PIP_OLD) $@ ray==$(OLDEST_RAY)

$(OLD_TRANSFORMERS): | $(READY)
	$(PIP_OLD) $@ transformers==$(OLDEST_TRANSFORMERS) huggingface_hub==1.3.0 tokenizers==0.22.2 httpx==0.28.1 \
		httpcore==1.0.9 h11==0.16.0 anyio==4.12.0

test-times: $(READY)
	@$(BIN)/python -m tests.times $(TIMES)

test-trackers: $(READY)
	$(PIP_INSTALL) --editable '.[tensorboard,wandb,mlflow]'
	$(PYTEST) tests/manager/test_trackers.py $(PYTEST_ARGS)

# It lives in a temporary folder; no daemon of the packages is started.
test-slurm: $(READY)
	@command -v slurmctld > /dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; }
	$(TEST_ENV) $(BIN)/python -m pytest -k slurm tests/providers/test_contract.py tests/providers/test_slurm.py \
		tests/system/test_slurm.py $(PYTEST_ARGS)

test-gpu: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

bench-gpu: $(READY)
	$(BIN)/python -m benchmarks device_speed

gpu-kit:
	PYTHON="$(PYTHON)" bash benchmarks/gpu_kit/prepare.sh

soak: $(READY)
	$(TEST_ENV) $(BIN)/python -m tests.chaos --minutes $(SOAK_MINUTES) $(if $(SOAK_STEPS),--long $(SOAK_STEPS)) $(if $(SOAK_FOLDER),--folder $(SOAK_FOLDER)) $(if $(SEED),--seed $(SEED))

check: lint types layers lines docs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

# A lid on growth: see tests/lines.py.
lines: $(READY)
	@$(BIN)/python -m tests.lines

tutorial-output: $(READY)
	$(TEST_ENV) $(BIN)/python -m tests.system.test_tutorial

# A warning, as of a link to a page or a heading that is not there, is an error. `.venv/bin/mkdocs serve` shows changes at once.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
