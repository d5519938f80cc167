# Everything a person or CI runs. Each target sets up what it needs; a second call does not reinstall.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
PYTEST := $(BIN)/python -m pytest

.PHONY: help install demo test test-slow sweep idioms soak test-gpu test-slurm lint check docs bench clean

help:  ## what there is to run
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 — \2/p' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## make .venv with everything that demo, tests and checks need

# torch first, exactly pinned: a looser request would bring the newest build, with gigabytes of CUDA packages.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch is about 200 MB to download as a CPU build (2–3 GB where pip's index gives the CUDA build)."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check '$(TORCH)'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install  ## see it work, in about a minute
	@$(BIN)/evergrad demo

# Twice as many workers as CI has cores: many tests wait for processes, disks and time limits.
# A test that fails is repeated once, and named at the end: the aim is that none is.
test: install  ## all tests that a plain machine can run
	$(PYTEST) -n 4 --reruns 1

test-slow: install  ## the long ones: files over 4 GB, more mutations
	$(PYTEST) -m slow

sweep: install  ## lose every rank at every place of a step: 176 jobs, about five minutes
	$(BIN)/python tests/recovery/sweep.py | tee benchmarks/results/recovery_sweep.txt

idioms: install  ## scripts in the idiom of nanoGPT and minGPT-ddp under 80 schedules of failures: about five minutes
	$(BIN)/python tests/recovery/idiom_sweep.py | tee benchmarks/results/recovery_idioms.txt

soak: install  ## a hundred failures of all kinds in one run: about ten minutes
	$(BIN)/python tests/recovery/soak.py | tee benchmarks/results/recovery_soak.txt

test-gpu: install  ## the ones that need a CUDA device
	$(PYTEST) -m gpu

test-slurm: install  ## a job on four nodes of a real Slurm, which root installs (Debian) and runs in a folder
	@if [ "$$(id -u)" = 0 ] && ! command -v slurmctld >/dev/null && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; fi
	@(echo '$$ make test-slurm'; $(PYTEST) -q -rs -m slurm tests/slurm; echo "exit code $$?") 2>&1 | tee benchmarks/results/test-slurm.txt
	@grep -q '^exit code 0$$' benchmarks/results/test-slurm.txt

lint: install  ## style and types
	$(BIN)/ruff check src tests benchmarks examples $(wildcard docs/*.py docs/*/*.py)
	$(BIN)/ruff format --check src tests benchmarks examples $(wildcard docs/*.py docs/*/*.py)
	$(BIN)/mypy

check: lint  ## style, types, and the rules of the house
	$(PYTEST) -q -n 2 -m check

# The variable silences a notice about what comes after mkdocs; warnings of the build are errors all the same.
docs: install  ## the documentation as a site, in site/; it is read from disk too
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --clean
	@echo "$(CURDIR)/site/index.html"

bench: install  ## every benchmark; results go to benchmarks/results
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[rivals]'
	@for main in benchmarks/*/main.py; do echo "== $$main"; $(BIN)/python $$main || exit 1; done

clean:  ## remove what the targets above made
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
