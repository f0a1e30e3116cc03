# make setup       set up the environment (below) and nothing else
# make test        run the tests for this machine, a few of each matrix; ARGS="-k rope" goes to pytest
# make lint        check style, format, and the lines of each room against lab/budget.json
# make gpu         run the tests, measurements and the doctor on this machine's GPU; ARGS=--dry-run: print the steps
# make docs        build the documentation site into site/, strictly and without a network
# make package     build the packages into dist/, check their files, run them in fresh environments
# make all         lint, test, and every other check that CI runs on each change: an hour on two cores
# make demo        train a small Llama here, plain and patched, and compare; ARGS="--model 1b" goes to liger-hw demo
#
# Each first sets up a virtual environment in VENV with the build of PyTorch for this machine's accelerator. PYTHON picks
# the interpreter, TORCH and TORCH_INDEX the build. NO_VENV=1 uses PYTHON unchanged and installs nothing.
# `.venv/bin/python -m liger_lab.tools.check list` prints every other check.

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

CHECK = $(RUN) -m liger_lab.tools.check

.PHONY: setup demo test lint gpu docs package all

setup: $(READY)

demo: $(READY)
	$(RUN) -m liger_hw demo $(ARGS)

test: $(READY)
	@$(CHECK) test $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m liger_lab.tools.sizes --brief

# a dry run prints the same steps for each vendor, and needs no GPU
gpu: VENDOR = $(if $(filter --dry-run,$(ARGS)),$(ACCELERATOR:none=nvidia),$(ACCELERATOR))
gpu:
	@test $(VENDOR) != none || { echo "make gpu: got no GPU on this machine; ACCELERATOR=nvidia, amd or intel" \
		"says which it is"; exit 1; }
	PYTHON=$(PYTHON) VENV=$(VENV) lab/gpu/$(VENDOR).sh $(ARGS)

docs: $(READY)
	$(RUN) -m mkdocs build --strict --config-file lab/mkdocs.yml $(ARGS)

package: $(READY)
	$(RUN) -m liger_lab.tools.package $(ARGS)

all: lint test
	$(CHECK) all

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
