# make run [ARGS="model=tiny train.steps=50"]   set up .venv and run the launcher
# make test                                     set up .venv and run the tests
# make test-slurm                               the tests that start a real SLURM of 4 virtual nodes (root, Debian)
PYTHON ?= python3
VENV ?= .venv
# Without an NVIDIA driver a local or configured index may supply the CPU build of this torch.
TORCH ?= $(if $(wildcard /proc/driver/nvidia/version),torch>=2.11,torch==2.13.0)
TORCH_INDEX ?=
ARGS ?=

.PHONY: run test test-slurm
run: $(VENV)/ready
	$(VENV)/bin/python -m launcher $(ARGS)

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

test-slurm: $(VENV)/ready
	$(VENV)/bin/python -m pytest -m slurm --durations=5 tests/slurm

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@
