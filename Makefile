# Every target makes what it needs. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed
PROTOS := $(wildcard protos/*.proto)
PODMAN_PACKAGES := podman buildah runc netavark aardvark-dns catatonit iptables
OLDEST := .cache/transformers-5.17/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo up test kit lint image cluster-check cluster-check-possible bench bench-gpu train protos clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## make .venv with everything that running and testing need

$(STAMP): pyproject.toml constraints.txt .ci/system-packages
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=…")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { sh .ci/system-packages python3-venv && $(PYTHON) -m venv $(VENV); }
	$(PIP) --editable '.[engine,dev]'
	@touch $(STAMP)

demo: $(STAMP) ## start all services on loopback, ask about drawn pictures (or IMAGE=file, or SEED=number again), stop
	@$(BIN)/python -m demo $(if $(SEED),--seed $(SEED)) $(if $(IMAGE),--image '$(IMAGE)')

up: $(STAMP) ## start all services on loopback, with the demo model, and stay up
	$(BIN)/triptych up --router-port 50060 --http-port 8000

test: $(STAMP) lint $(OLDEST) ## everything that must hold before a change lands
	sh .ci/system-packages redis-server
	PYTHONPATH=$(dir $(OLDEST)) $(BIN)/python -c 'import transformers as t; assert t.__version__ == "5.17.0", t.__version__'
	PYTHONPATH=$(dir $(OLDEST)) $(BIN)/python -m pytest --quiet tests/engine/models/test_equality.py tests/engine/models/test_grid.py
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# The oldest transformers that we claim to work with, laid over the newest: bare GPU machines carry it.
$(OLDEST): | $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(dir $(OLDEST)) \
	    transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 certifi
	@touch $(OLDEST)

kit: $(STAMP) ## the conformance kit on every connector; `make test` has three of them
	sh .ci/system-packages redis-server
	$(BIN)/python -m pytest tests/connectors/test_conformance.py -m 'whole_kit or not whole_kit'
	$(BIN)/python -m pytest tests/connectors/test_conformance_mutants.py -m whole_kit

lint: $(STAMP) ## format, style, types, import floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

image: ## build both container images with podman or docker (BASE=debian: without an image registry; VARIANT=cuda)
	command -v podman >/dev/null || command -v docker >/dev/null || sh .ci/system-packages $(PODMAN_PACKAGES)
	sh k8s/tools/image.sh

cluster-check: $(STAMP) ## run the rendered manifests with podman: roll, scale, kill (as root, after make image)
	command -v podman >/dev/null || sh .ci/system-packages $(PODMAN_PACKAGES)
	$(BIN)/python -m k8s.tools.cluster_check

cluster-check-possible: $(STAMP) ## whether containers can run here; else one line that says what is missing
	command -v podman >/dev/null || sh .ci/system-packages $(PODMAN_PACKAGES)
	@$(BIN)/python -m k8s.tools.possible

bench: $(STAMP) ## throughput and latency beside transformers, same model, same run
	$(BIN)/python -m benchmarks.serving

# The system's Python: a GPU machine has torch, Triton and transformers, and often no package index.
bench-gpu: ## kernels on this machine's GPU, correctness first, then beside its ceilings and PyTorch; into .cache
	mkdir -p .cache
	$(PYTHON) -m benchmarks.kernels --json .cache/kernels.json --plot .cache/kernels.png --check

train: $(STAMP) ## train the demo model again (some 75 minutes on two cores); goes on where it was stopped
	$(BIN)/python -m demo.training

protos: $(STAMP) ## generate the Python code of protos/
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

clean: ## remove everything that the other targets made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
