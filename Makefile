# The repository's habits. `make` alone lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
# PyTorch's own index of CPU builds, asked on machines without an NVIDIA GPU (see .ci/setup), and by make lock. Empty: never asked.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
export TORCH_CPU_INDEX
# Arguments passed on: make quickstart ARGS="--steps 5", make test ARGS="tests/unit -k ledger"
ARGS ?=
# Trackers of --report-to that are set up, too: make setup EXTRAS=tensorboard,wandb
EXTRAS ?=
export EXTRAS
# Benchmark to run, empty lists them: make bench NAME=trajectory ARGS=--full
NAME ?=
# Interpreter for `make gpu-check` instead of .venv's, which is then not set up: make gpu-check GPU_PYTHON=python3
GPU_PYTHON ?=
# What `make check` compares with: make check BASE=main
BASE ?= HEAD
# Minutes for `make test`: what must hold always is run whatever it takes, and of the rest what there is time for.
BUDGET ?=
# Test processes. A module's tests that start processes share one of them.
WORKERS ?= 2

.PHONY: help setup lock quickstart check test test-long test-browser test-extras docs pictures smoke nemesis golden lint format bench gpu-check image swarm-up swarm-down clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with everything in it; does nothing when it is up to date; EXTRAS=tensorboard for --report-to
	@.ci/setup

lock: setup ## renew locks/ after a change of dependencies; ARGS="--upgrade-package numpy" raises a pin, --upgrade all
	@$(VENV)/bin/python -m tests.harness.locks $(ARGS)

quickstart: setup ## train a small model with a local swarm, within two minutes; ARGS="--minutes 5 --peers 2"
	@$(VENV)/bin/swarm quickstart $(ARGS)

test: setup ## the tests that need neither root nor Docker, in about eight minutes; BUDGET=7 begins no more after seven; ARGS passed to pytest
	@$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(if $(BUDGET),--budget $(BUDGET)) $(ARGS)

check: setup lint ## before each commit: lint, types, and the tests of what differs from BASE (default HEAD), in minutes
	@tests=$$($(VENV)/bin/python -m tests.harness.touched $(BASE)) \
	  && $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $$tests $(ARGS)

test-long: setup ## the stories and plays that `make test` leaves to .ci/run; ARGS passed to pytest
	@$(VENV)/bin/python -m pytest -m long -n $(WORKERS) --dist loadgroup $(ARGS)

test-browser: setup ## the dashboard in a headless Chromium (Debian: apt install chromium chromium-driver); ARGS passed to pytest
	@$(VENV)/bin/python -m pytest -m browser -o faulthandler_timeout=0 $(ARGS)

test-extras: setup ## those of --report-to with the trackers themselves, offline; installs them into .venv-extras
	@sort -u locks/tensorboard.txt locks/wandb.txt locks/mlflow.txt | cmp -s - .venv-extras/.lock || { rm -rf .venv-extras \
	  && $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps --target .venv-extras \
	  -r locks/tensorboard.txt -r locks/wandb.txt -r locks/mlflow.txt \
	  && sort -u locks/tensorboard.txt locks/wandb.txt locks/mlflow.txt >.venv-extras/.lock; }
	@PYTHONPATH=.venv-extras $(VENV)/bin/python -m pytest -m extras $(ARGS)

nemesis: setup ## the tests with faults that take minutes, in one process; ARGS passed to pytest
	@$(VENV)/bin/python -m pytest -m nemesis -o faulthandler_timeout=0 $(ARGS)

smoke: setup ## every benchmark at its smallest, in minutes; ARGS passed to pytest
	@$(VENV)/bin/python -m pytest -m smoke -n $(WORKERS) --dist loadgroup -o faulthandler_timeout=0 $(ARGS)

golden: setup ## does this checkout do to the bit what the base commit does? ARGS="--stories sync,kill-host --seeds 2"
	@$(VENV)/bin/python -m tests.golden $(ARGS)

docs: setup .venv-docs/.lock ## the manual as a site in build/docs, every link checked
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=.venv-docs $(VENV)/bin/python -m mkdocs build --quiet --strict && echo "build/docs/index.html"

# Beside .venv, which stays as it is.
.venv-docs/.lock: locks/docs.txt
	@rm -rf .venv-docs
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps --target .venv-docs -r $<
	@cp $< $@

pictures: setup ## the manual's pictures, from a real run with churn: look at them before they are committed
	@$(VENV)/bin/python -m tests.harness.pictures

lint: setup ## ruff and mypy, nothing changed
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format: setup ## let ruff mend what it can
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

bench: setup ## measure: NAME=… ARGS="--full --log", no NAME lists them
	@$(VENV)/bin/python -m tests.benchmarks $(NAME) $(ARGS)

gpu-check: $(if $(GPU_PYTHON),,setup) ## does this GPU give what a CPU gives, and what does a stage cost on it? GPU_PYTHON=python3
	@$(or $(GPU_PYTHON),$(VENV)/bin/python) -m tests.benchmarks._gpu_check

image: ## the image of a peer, from this checkout; BASE_IMAGE=… VARIANT=cuda
	@docker/image.sh

swarm-up: ## a swarm of nine containers, from the image to its first closed step
	@docker/up.sh

swarm-down: ## remove it: containers, networks, volumes
	@docker/down.sh

clean: ## remove .venv and caches; keeps out/
	@rm -rf $(VENV) .venv-extras .venv-docs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
