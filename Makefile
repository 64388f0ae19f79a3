# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
#
# Every target works in a fresh clone: setup makes .venv from the lock and picks a free port.
#   make setup [PYTHON=/path/to/python3.11]
#   make demo [BREAK=layer_offset|truncated_so]    the whole pipeline on this machine
#   make test                                      lint, unit tests, end to end; the last line is the result

SHELL := /bin/bash
.DEFAULT_GOAL := setup
.PHONY: setup demo demo-down test lint truth-table sanity test-build build-real test-serving \
        test-fleet hosts hosts-down bench gpu-bundle gpu-rehearsal

export PYTHON
python := .venv/bin/python
ready := PATH="$(CURDIR)/.venv/bin:$$PATH"

setup:
	@tools/setup.sh

demo: setup
	@$(ready) $(python) demo/run.py $(if $(BREAK),--break '$(BREAK)')

demo-down: setup
	@$(ready) $(python) demo/run.py --down

test: setup
	@$(ready) $(python) tests/run.py $(STAGES)

lint: setup
	@tools/lint.sh

# The probes over all releases, broken ones and forks; downloads the release archives once (700 MB), then cached.
truth-table: setup
	@$(ready) $(python) tests/truth_table/run.py $(TABLE)

sanity test-build build-real test-serving test-fleet hosts hosts-down bench gpu-bundle gpu-rehearsal: setup
	@echo "not built yet: make $@"; exit 2
