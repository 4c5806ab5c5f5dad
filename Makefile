# Tests and the rehearsal. Needs git, GNU make and python3.11; what is built lies in the cache, outside the tree.
#
#   make rehearse        the whole main job on a host that is booted for it (root); again: changed=0
#   make rehearse-down   stop and remove that host
#   make test            everything that .ci/run runs
#   make drill           faults on a serving host, 45 minutes; writes molecule/drill/RESULTS.md
#   make host-cases      driver and kernel cases with their reboots, 20 minutes

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/blackwell-dsv4
# The virtual environment is named by what it is made from: another list of versions is another environment.
VENV := $(CACHE)/venv/$(shell { $(PYTHON) -V; cat tests/requirements.txt; } 2>/dev/null | sha256sum | cut -c 1-12)
HOST := molecule/rehearsal_host/host.py
IN_VENV := PATH="$(VENV)/bin:$$PATH"

.PHONY: help
help:
	@sed -n '/^#   make/s/^# *//p' Makefile; echo "parts of make test: $(PARTS)"

.PHONY: venv
venv: $(VENV)/.complete

$(VENV)/.complete:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11, or name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments: apt-get install $(notdir $(PYTHON))-venv" >&2; exit 1; }
	@echo "make: virtual environment $(VENV) ..."
	@rm -rf "$(VENV)"; started=$$SECONDS; $(PYTHON) -m venv "$(VENV)"; \
	"$(VENV)/bin/pip" install -qq --disable-pip-version-check --no-deps --requirement tests/requirements.txt; \
	touch "$@"; echo "make: virtual environment done in $$((SECONDS - started)) s"

# --- the rehearsal host ---------------------------------------------------------------------------------------

.PHONY: rehearse rehearse-down rehearse-check
rehearse-check:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11, or name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) $(HOST) check

rehearse: rehearse-check venv
	@$(IN_VENV) molecule/rehearsal_host/rehearse.sh

rehearse-down:
	@$(PYTHON) $(HOST) down

# --- the tests ------------------------------------------------------------------------------------------------

PARTS := lint unit kernels check-kernels check-engine-args package next router sanity molecule
.PHONY: test $(PARTS) drill host-cases
test: rehearse-check venv
	@$(IN_VENV) tests/parts.sh $(PARTS)

lint: venv
	$(IN_VENV) ansible-lint --offline --profile production --strict
	$(IN_VENV) ruff check --quiet --no-cache --select E9,F,W --exclude .collections .

unit: venv
	$(IN_VENV) python -m pytest -q tests/unit

# The plugin is held against the unmodified wheel of the engine, unpacked and not installed. Apart from the unit tests, whose
# sglang is the rehearsal engine.
SGLANG := $(CACHE)/sglang-0.5.23
$(SGLANG)/.complete: | venv
	@rm -rf "$(SGLANG)"; mkdir -p "$(SGLANG)"; \
	"$(VENV)/bin/pip" download -qq --disable-pip-version-check --no-deps --dest "$(SGLANG)" sglang==0.5.23; \
	$(PYTHON) -m zipfile --extract "$(SGLANG)"/sglang-*.whl "$(SGLANG)"; touch "$@"

# Beside PyTorch, where it can be had: without it the references, the emulated kernels and Triton's interpreter are skipped.
kernels: venv $(SGLANG)/.complete
	python=$$(tests/engine_args/environment.sh); \
	$(IN_VENV) DSV4_SM120_SGLANG="$(SGLANG)" "$${python:-python}" -m pytest -q files/kernels

# nvcc comes from PyPI, as on a host without a toolkit, in an environment of its own.
NVCC := $(CACHE)/nvcc/$(shell { $(PYTHON) -V; cat files/requirements/kernel-build.txt; } 2>/dev/null | sha256sum | cut -c 1-12)
$(NVCC)/.complete:
	@rm -rf "$(NVCC)"; $(PYTHON) -m venv "$(NVCC)"; \
	"$(NVCC)/bin/pip" install -qq --disable-pip-version-check --no-deps --require-hashes --requirement files/requirements/kernel-build.txt; \
	touch "$@"

check-kernels: $(NVCC)/.complete
	CUDA_HOME= "$(NVCC)/bin/python" -B files/kernels/check_kernels.py --nvcc "$$("$(NVCC)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13/bin/nvcc"

check-engine-args: venv
	$(IN_VENV) tests/engine_args/check.sh

package: venv
	$(IN_VENV) tests/package.sh

next:
	tests/ansible_next.sh

router: venv
	$(IN_VENV) python -m pytest -q tests/router

sanity: venv
	$(IN_VENV) tests/sanity.sh

molecule: venv
	$(IN_VENV) molecule test

# Long ones that `make test` leaves out: faults on a serving host; the driver cases with their reboots.
drill: rehearse-check venv
	$(IN_VENV) molecule test --scenario-name drill

host-cases: rehearse-check venv
	$(IN_VENV) PYTHONPATH=.collections python -m pytest -q tests/host
