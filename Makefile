# make setup       set up the environment (below) and nothing else
# make demo        train a small Llama here, plain and patched, and compare; ARGS="--model 1b" goes to liger-hw demo
# make test        run the tests for this machine, a few of each matrix; ARGS="-k rope" goes to pytest
# make programs    run the examples, the tutorial op, engines, the benchmark, the emulation: tests of whole programs
# make models      compare every class of transformers' language models with its patched copy; run kernels in models
#                  and losses
# make compile     compile every kernel for one architecture of each kind; ARGS="--archs all": for all
# make emulate     execute AMD machine code of every op without an AMD GPU; ARGS="--few --archs gfx942": in minutes
# make interpret   run the kernels' tests in Triton's interpreter for every vendor; LIGER_HW_BACKEND=amd:gfx942: for one GPU
# make mutants     plant mistakes in kernels; their tests must fail
# make fuzz        run random programs on tiny models, plain and patched; LIGER_HW_FUZZ=10000 sets how many
# make converge    train mini models of every family of liger-kernel's list, plain and patched, and compare
# make lint        check style and format
# make versions    test models and trainers on the oldest and the newest transformers; ARGS="--all": on all
# make docs        build the documentation site into site/, strictly and without a network
# make notebook    execute the notebook of the examples, in about a minute
# make package     build wheel and sdist into dist/, check their files, run the wheel in a fresh environment
# make distributed test DeepSpeed and the launch of examples on two ranks; installs DeepSpeed
# make trl         test losses against TRL's trainers of two versions, and the examples; installs TRL and Lightning
#
# Each first sets up a virtual environment in VENV with the build of PyTorch for this machine's accelerator. PYTHON picks
# the interpreter, TORCH and TORCH_INDEX the build. NO_VENV=1 uses PYTHON unchanged and installs nothing.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

ifneq ($(wildcard /dev/nvidiactl /dev/nvidia0),)
ACCELERATOR ?= nvidia
else ifneq ($(wildcard /dev/kfd),)
ACCELERATOR ?= amd
else ifneq ($(shell grep -ls 0x8086 /sys/class/drm/renderD*/device/vendor && ldconfig -p 2>/dev/null | grep libze_loader),)
ACCELERATOR ?= intel
else
ACCELERATOR ?= none
endif

TORCH ?= torch==2.13.0
TORCH_INDEX ?=

ifdef NO_VENV
RUN = PYTHONPATH=$(CURDIR):$(CURDIR)/lab $(PYTHON)
READY =
else
RUN = $(VENV)/bin/python
READY = $(VENV)/.ready-$(ACCELERATOR)
endif
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo test programs models compile emulate interpret fuzz converge mutants lint versions docs notebook \
	package distributed trl clean

setup: $(READY)

demo: $(READY)
	$(RUN) -m liger_hw demo $(ARGS)

OPS = tests/kernels tests/test_dispatch.py tests/test_tracing.py
USERS_OF_OPS = tests/losses tests/transformers/test_kernels_in_models.py
INTERPRET = TRITON_INTERPRET=1 $(RUN) -m pytest -n auto
PROGRAMS = tests/test_examples.py tests/test_new_op.py tests/test_bench.py tests/test_distributed_bench.py \
	tests/test_emulation.py tests/transformers/test_activations.py tests/transformers/test_engines.py
COMPILED = tests/test_targets.py tests/losses/test_losses_on_targets.py

# Two runs, because the import of Triton chooses its interpreter; the second has the tests that need it. Both always run.
# A test of kernels takes one vendor or architecture, in turn.
test: $(READY)
	@failed=0; \
	$(RUN) -m pytest -n auto --archs turns $(PROGRAMS:%=--ignore=%) $(ARGS) || failed=1; \
	$(INTERPRET) $(OPS) --archs turns $(ARGS) || failed=1; \
	exit $$failed

programs: $(READY)
	$(RUN) -m pytest -n auto --archs turns $(PROGRAMS) $(ARGS)

models: $(READY)
	$(RUN) -m pytest -n auto --models all tests/transformers/test_models.py tests/transformers/test_parts.py $(ARGS)
	$(INTERPRET) $(USERS_OF_OPS) --archs turns $(ARGS)

compile: $(READY)
	$(RUN) -m pytest -n auto $(COMPILED) $(ARGS)

emulate: $(READY)
	$(RUN) -m liger_hw emulate $(ARGS)

interpret: $(READY)
	$(INTERPRET) $(OPS) $(USERS_OF_OPS) $(ARGS)

fuzz: $(READY)
	$(RUN) tests/fuzz/run.py $(ARGS)

converge: $(READY)
	$(RUN) -m liger_lab.tools.converge $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

$(VENV)/.ready-$(ACCELERATOR): pyproject.toml lab/pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "liger_hw needs Python 3.11 or newer, and this is " \
		+ sys.version.split()[0] + ": make PYTHON=/path/to/another")'
	@echo "setting up $(VENV) (accelerator: $(ACCELERATOR))"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
ifeq ($(ACCELERATOR)-$(shell uname)-$(TORCH_INDEX),none-Linux-)
# torch==2.13.0 for Linux may include 3 GB of CUDA; +cpu is the build without, on every index of pip.
	@$(PIP) '$(TORCH)+cpu' || { echo "pip finds no CPU build of $(TORCH): set TORCH_INDEX=... to the index that the" \
		"installation page of pytorch.org gives for CPU, or TORCH=... to a build of your choice"; exit 1; }
else ifneq ($(filter amd intel,$(ACCELERATOR)),)
	@test -n "$(TORCH_INDEX)" || { echo "set TORCH_INDEX=... to the index that the installation page of pytorch.org gives" \
		"for this $(ACCELERATOR) GPU (ROCm or XPU)"; exit 1; }
	$(PIP) --index-url $(TORCH_INDEX) '$(TORCH)'
else
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
endif
# Nothing below may replace that torch, nor the Triton of a vendor's torch by PyPI's.
	$(PIP) --no-deps --editable . --editable lab
	@$(VENV)/bin/python -c 'import importlib.metadata as m; \
		print("torch==" + m.version("torch"), file=open("$(VENV)/constraints.txt", "w")); \
		vendors = {"torch", "liger_hw", "liger_hw-lab"} | ({"triton"} if "$(ACCELERATOR)" in ("amd", "intel") else set()); \
		wanted = [r.partition(";")[0] for r in m.requires("liger_hw") + m.requires("liger_hw-lab")]; \
		named = lambda r: r.replace("[", ">").partition(">")[0].strip(); \
		print(*(r for r in wanted if named(r) not in vendors), sep="\n", file=open("$(VENV)/requirements.txt", "w"))'
	$(PIP) --constraint $(VENV)/constraints.txt --requirement $(VENV)/requirements.txt
	@touch $@

versions: $(READY)
	$(RUN) -m liger_lab.tools.transformers_versions $(ARGS)

docs: $(READY)
	$(RUN) -m mkdocs build --strict --config-file lab/mkdocs.yml $(ARGS)

notebook: $(READY)
	$(RUN) -m liger_lab.tools.notebook $(ARGS)

package: $(READY)
	$(RUN) -m liger_lab.tools.package $(ARGS)

# DeepSpeed compiles its operators at their first use, not here.
distributed: $(READY)
	$(if $(READY),DS_BUILD_OPS=0 $(PIP) --no-build-isolation --constraint $(VENV)/constraints.txt setuptools deepspeed)
	$(RUN) -m pytest tests/transformers/test_deepspeed.py tests/test_examples.py -k 'deepspeed or launch or two_ranks' \
		$(ARGS)

# TRL needs datasets, pandas and pyarrow, which nothing else here needs. Today's frameworks pin 1.9, which calls
# liger_kernel's losses; 1.16 has its own.
trl: $(READY)
	$(if $(READY),$(PIP) --constraint $(VENV)/constraints.txt 'trl==1.9.0' requests lightning)
	TRL_EXPERIMENTAL_SILENCE=1 $(RUN) -m pytest -k trl tests/integrations/test_trainers.py
	$(if $(READY),$(PIP) --constraint $(VENV)/constraints.txt 'trl>=1.16')
	TRL_EXPERIMENTAL_SILENCE=1 $(RUN) -m pytest -n 2 -k 'trl or example' tests/losses/test_trl.py \
		tests/integrations/test_trainers.py tests/test_examples.py

# The tests of these kernels must fail with planted mistakes.
mutants: $(READY)
	$(RUN) -m liger_lab.tools.mutants rms_norm glu of_logits sequences

clean:
	rm -rf $(VENV) report site dist
