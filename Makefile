# Two commands on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
# Empty: what GPUSCORE_PORT and GPUSCORE_MODEL say, or gpuscore's own defaults, 8000 and demo.
PORT ?=
MODEL ?=

VENV := .venv
BIN := $(VENV)/bin
SERVES := $(VENV)/.serves
STAMP := $(VENV)/.installed

# The CPU build, because the plain one pulls gigabytes of CUDA packages. Where pip does not find it
# (it may be configured with a local copy), PyTorch's public CPU index is added. For a GPU machine:
# make setup TORCH='torch==2.13.0'
TORCH ?= torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup serve test test-all test-hostile test-hostile-together test-clients test-ray test-web test-kernels test-gpu check-kernels \
        check-kernels-all check-streams check-graphs check-tpu simulate simulate-fronts soak check format demo golden bench-cpu bench-heap bench-start \
        bench-gpu bench-kernels bench-attention bench-host bench-host-parts gpu-day gpu-day-trial bench-batch bench-ray-batch bench-parity bench-tokenise \
        bench-in-process bench-decisions bench-ray bench-replicas bench-serve predict fixtures flashinfer-stub locks image image-cuda image-tpu image-lint image-test \
        manifests-test audit docs docs-serve \
        docs-tools clean

# Everything that make test and make check need.
setup: $(STAMP)

# pip compiles on one core; afterwards it is done on all. What does not compile are templates that
# some packages ship, which pip passes over as well.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true

# What serving needs.
$(SERVES): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "gpuscore needs Python 3.11 or 3.12; choose one with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) '$(TORCH)' || $(PIP_INSTALL) --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	$(PIP_INSTALL) --editable .
	$(COMPILE)
	@touch $@

$(STAMP): $(SERVES)
	$(PIP_INSTALL) --editable '.[dev]'
	$(COMPILE)
	@touch $@

# The image's Triton, beside the torch of the tests: torch's CPU build works with either, and kernels
# are compiled without a GPU. The .pth file makes $(VENV)'s packages visible.
IMAGE_TRITON := $(shell sed -n 's/^triton==\([0-9.]*\).*/\1/p' docker/locks/cuda.txt)
TRITON_VENV := .venv-triton-$(IMAGE_TRITON)

$(TRITON_VENV)/.installed: $(STAMP)
	$(BIN)/python -m venv $(TRITON_VENV)
	$(TRITON_VENV)/bin/python -m pip install --quiet --no-deps triton==$(IMAGE_TRITON)
	site() { $$1/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN))')" > "$$(site $(TRITON_VENV)/bin)/tests.pth"
	@touch $@

# The image's libtpu, beside the JAX of the tests in the same way: it compiles for TPUs that are not
# there. A wheel of 213 MB, 0.7 GB on disk.
LIBTPU := $(shell sed -n 's/^libtpu==\([0-9.]*\).*/\1/p' docker/locks/tpu.txt)
TPU_VENV := .venv-tpu-$(LIBTPU)

$(TPU_VENV)/.installed: $(STAMP)
	$(BIN)/python -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet --no-deps --no-compile libtpu==$(LIBTPU)
	site() { $$1/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN))')" > "$$(site $(TPU_VENV)/bin)/tests.pth"
	@touch $@

# PyTorch's CPU build cannot use a GPU, and gpuscore refuses to leave one unused unless the device is
# named. Another build chooses its device itself.
CPU_BUILD := $(VENV)/lib/python*/site-packages/torch-*+cpu.dist-info

serve: $(SERVES)
	@device=$$(ls -d $(CPU_BUILD) > /dev/null 2>&1 && echo cpu); \
	GPUSCORE_DEVICE=$${GPUSCORE_DEVICE:-$$device} exec $(BIN)/gpuscore serve $(MODEL) $(addprefix --port ,$(PORT))

# tests/conftest.py says how many workers auto means, and what stays together.
PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder

# All but what searches long.
test: setup
	$(PYTEST)

# With the tests marked slow; hostile ones and those that need a GPU have targets of their own. What
# transformers computes is computed again and compared with what make test keeps in .cache/tests.
# Where libtpu cannot be installed (its wheels are for Linux), its tests are skipped, loudly; with
# REQUIRE_LIBTPU=1, as in .ci/run, that is an error.
test-all: setup $(TRITON_VENV)/.installed
	@$(MAKE) --no-print-directory $(TPU_VENV)/.installed || \
	  { echo 'libtpu is not installed: NOTHING IS COMPILED FOR A TPU'; [ '$(REQUIRE_LIBTPU)' != 1 ]; }
	RECOMPUTE_REFERENCES=1 $(PYTEST) -m 'not hostile and not long'

# Attacks, faults and broken models, some 20 minutes on two cores: what may run side by side, then,
# whether or not that failed, what measures how late answers are. One file of them:
# .venv/bin/pytest -m 'hostile or not hostile' tests/hostile/test_http.py
SCHEMATHESIS_VENV := .venv-schemathesis

$(SCHEMATHESIS_VENV)/.installed: tests/hostile/requirements.txt
	$(PYTHON) -m venv $(SCHEMATHESIS_VENV)
	$(SCHEMATHESIS_VENV)/bin/python -m pip install --quiet -r $<
	@touch $@

HOSTILE = SCHEMATHESIS=$(CURDIR)/$(SCHEMATHESIS_VENV)/bin/schemathesis $(BIN)/pytest tests/hostile --durations 10
test-hostile: setup
	@status=0; \
	$(MAKE) --no-print-directory test-hostile-together || status=1; \
	$(HOSTILE) -m alone || status=1; \
	exit $$status

# The first part of it, which .ci/run runs.
test-hostile-together: setup $(SCHEMATHESIS_VENV)/.installed
	$(HOSTILE) -m 'not alone' --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Other people's clients, from PyPI, against a server: minutes of installation the first time, then
# found in .venv-clients. Some of them only: make test-clients ARGS='cohere litellm'
test-clients: setup
	$(BIN)/python -P tests_clients/run.py --torch '$(TORCH)' --torch-index '$(TORCH_INDEX)' $(ARGS)

# The pages for people in headless Chromium, such as Debian's package, by Playwright's driver; a minute or
# two. Screenshots for people to look at go to .cache/web. One file: make test-web ARGS=tests_web/test_docs.py
WEB_VENV := .venv-web
CHROMIUM ?= chromium

$(WEB_VENV)/.installed: tests_web/requirements.txt
	$(PYTHON) -m venv $(WEB_VENV)
	$(WEB_VENV)/bin/python -m pip install --quiet -r $<
	@touch $@

test-web: setup $(WEB_VENV)/.installed
	@command -v $(CHROMIUM) > /dev/null || { echo "make test-web needs Chromium: apt install chromium"; exit 1; }
	GPUSCORE=$(BIN)/gpuscore CHROMIUM=$$(command -v $(CHROMIUM)) SCREENSHOTS=.cache/web \
	  $(WEB_VENV)/bin/pytest -c tests_web/pytest.ini $(or $(ARGS),tests_web)

# Ray on two local nodes, each with processes of its own, without network; three minutes. One
# file: make test-ray ARGS=tests_ray/test_cluster.py
RAY_VENV := .venv-ray

$(RAY_VENV)/.installed: pyproject.toml tests_ray/requirements.txt
	$(PYTHON) -m venv $(RAY_VENV)
	pip="$(RAY_VENV)/bin/python -m pip install --quiet"; \
	  $$pip '$(TORCH)' || $$pip --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	$(RAY_VENV)/bin/python -m pip install --quiet --editable '.[ray]' -r tests_ray/requirements.txt
	@touch $@

test-ray: $(RAY_VENV)/.installed
	$(RAY_VENV)/bin/python -P -m pytest -c tests_ray/pytest.ini $(or $(ARGS),tests_ray)

# Small quantised checkpoints and what their libraries answer, into tests/fixtures/quantized, by
# llmcompressor in an environment of its own. They are checked in; a second run gives the same bytes.
FIXTURES_VENV := .venv-fixtures

$(FIXTURES_VENV)/.installed: tests/fixtures/make/requirements.txt
	$(PYTHON) -m venv $(FIXTURES_VENV)
	pip="$(FIXTURES_VENV)/bin/python -m pip install --quiet"; \
	  $$pip '$(TORCH)' || $$pip --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	$(FIXTURES_VENV)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

fixtures: $(FIXTURES_VENV)/.installed
	CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 PYTHONPATH=tests \
	  $(FIXTURES_VENV)/bin/python -P -m fixtures.make $(ARGS)

# Compiles the Triton kernels for every architecture, without a GPU, with the Triton of the tests and
# with the image's, and checks the code: what make test-all compiles, and all. Facts of code that was
# compiled before are found in .cache/kernels. After a wanted change: make check-kernels ARGS=--update
check-kernels: setup $(TRITON_VENV)/.installed
	@status=0; for python in $(BIN) $(TRITON_VENV)/bin; do \
	  PYTHONPATH=tools $$python/python -P -m kernel_code $(ARGS) || status=1; \
	done; exit $$status

check-kernels-all:
	@$(MAKE) --no-print-directory check-kernels ARGS='--all $(ARGS)'

# Compiles the programs of --backend jax for TPU v5e and v6e, without a TPU, checks the code against
# tests/tpu_code/baseline.json and predicts times; at most 20 minutes on two cores. Facts of programs
# that were compiled before are found in .cache/tpu. After a wanted change: make check-tpu
# ARGS=--update; what make test-all compiles: ARGS=--quick
check-tpu: setup $(TPU_VENV)/.installed
	PYTHONPATH=$(CURDIR)/tests $(TPU_VENV)/bin/python -P -m tpu_code.check $(ARGS)

# Runs the CUDA launcher of real models on a simulated device: what is captured, launched,
# compiled and allocated, against a baseline; ARGS=--update rewrites it.
check-graphs: setup
	PYTHONPATH=tests $(BIN)/python -P -m graphs.check $(ARGS)

# The kernels' tests in Triton's interpreter; make test runs a part, make test-all all of them.
test-kernels: setup
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels/triton_interpreter -m 'not hostile'

# The same on a CUDA device, bfloat16 included. No virtual environment: torch, triton, transformers
# and pytest of PYTHON are enough. With pytest-xdist it compiles kernels on all cores; afterwards come
# the tests that run alone, because one of them takes all of the card's memory.
PYTEST_GPU = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(PYTHON) -m pytest \
  -p no:cacheprovider -m 'not hostile'
test-gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "make test-gpu needs a CUDA device"; exit 1; }
	@status=0; workers=$$($(PYTHON) -c 'import xdist' 2> /dev/null && \
	  echo --numprocesses auto --maxprocesses 12); \
	$(PYTEST_GPU) $$workers tests/kernels/triton_interpreter tests/backends/test_gpu_attention.py \
	  tests/backends/test_contract.py -k 'not jax' || status=1; \
	$(PYTEST_GPU) tests/backends/test_gpu_runner.py || status=1; \
	exit $$status

# Scores of the demo model, which the tests compare every backend with. Renew them after a change of
# the demo or of parity's workload, for no other reason: the tests then say so.
GOLDEN := tests/fixtures/golden
RECORD := $(BIN)/python -P -m gpuscore parity record demo --workload quick --device cpu --threads 1
golden: setup
	rm -rf $(GOLDEN)
	$(RECORD) --dtype float32 --output $(GOLDEN)/torch-float32
	$(RECORD) --dtype float32 --oracle --output $(GOLDEN)/transformers-float32
	$(RECORD) --dtype bfloat16 --oracle --output $(GOLDEN)/transformers-bfloat16

# More seeded worlds than the suite runs: make simulate SEEDS=100000
SEEDS ?= 20000
simulate: setup
	SIMULATED_SEEDS=$(SEEDS) $(BIN)/pytest tests/engine/test_simulation.py -m 'not hostile' \
	  --numprocesses auto --maxprocesses 4

# Predicts what several HTTP workers and engines answer, from CPU times of make bench-serve.
simulate-fronts: setup
	$(BIN)/python -P bench/fronts.py $(ARGS)

# Records every access of the CUDA launcher to memory, on a simulated device, and looks for
# two without order; then plants defects. Some 55 CPU-seconds, on all cores. More: make check-streams
# ARGS='--worlds 500'
check-streams: setup
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m support.streams $(ARGS)

# Never changes files.
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -P tools/check_house.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Trains the embedded model anew; about an hour on two cores.
demo: setup
	PYTHONPATH=training $(BIN)/python -P -m demo.train --output gpuscore/demo --seed 0

bench-cpu: setup
	$(BIN)/python -P bench/cpu.py $(ARGS)

bench-start: setup
	$(BIN)/python -P bench/start.py $(ARGS)

bench-heap: setup
	$(BIN)/python -P bench/heap.py $(ARGS)

# Under 8 minutes on a CUDA device. No virtual environment: torch, triton and transformers of PYTHON
# are enough, and for SERVE=1, which adds the rows over HTTP, the server's dependencies.
bench-gpu:
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(PYTHON) bench/gpu.py \
	  $(if $(SERVE),--serve) $(ARGS)

# On a CUDA device, at most 25 minutes, no network: tests, benches, attention backends, parity, and the
# gate on generated code, as one JSON file and one page in gpu-day/. The same command continues a run
# that ended early. A trial on a CPU: make gpu-day PYTHON=.venv/bin/python ARGS='--device cpu'
gpu-day:
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(PYTHON) bench/gpu_day.py $(ARGS)

# The same from end to end on a simulated card: killed, continued, and the card lost in one stage. Some
# seven minutes on two quiet cores.
gpu-day-trial: setup
	$(BIN)/pytest tests/bench/test_gpu_day.py -m long

# Host time of launches; without a device.
bench-host: setup
	PYTHONPATH=tests $(BIN)/python -P bench/host_time.py $(ARGS)

# Host time of a request around the device's work; without a device.
bench-host-parts: setup
	PYTHONPATH=tests $(BIN)/python -P bench/host_parts.py $(ARGS)

# Needs a CUDA device; torch and triton of PYTHON are enough.
bench-kernels:
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(PYTHON) bench/kernels.py $(ARGS)

# Like test-gpu on a machine of its own; this one stops with a message without a CUDA device.
bench-attention:
	PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(PYTHON) -P bench/attention.py $(ARGS)

# Predicted times on GPUs that are not at hand, with the model's error; compiles, without a GPU, what
# is not in .cache/kernels. ARGS=--search: choose attention's configuration, if the error permits it.
predict: setup
	$(BIN)/python -P bench/predict.py $(ARGS)

bench-batch: setup
	$(BIN)/python -P bench/batch.py $(ARGS)

bench-ray-batch: $(RAY_VENV)/.installed
	$(RAY_VENV)/bin/python -P bench/ray_batch.py $(ARGS)

bench-parity: setup
	$(BIN)/python -P bench/parity.py $(ARGS)

bench-tokenise: setup
	$(BIN)/python -P bench/tokenise.py

bench-serve: setup
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/pip install --quiet --editable '.[bench]'
	$(BIN)/python -P bench/serve.py $(ARGS)

# Typed questions over HTTP, with ARGS='--vllm VENV/bin/python' beside vLLM's; ARGS=--order and
# ARGS=--predict are explained by ARGS=--help.
bench-decisions: setup
	$(BIN)/python -P bench/decisions.py $(ARGS)

# Many queries in one process, against one query's many items.
bench-in-process: setup
	$(BIN)/python -P bench/in_process.py $(ARGS)

# The same requests to gpuscore serve and through Ray Serve, in turns.
bench-ray: $(RAY_VENV)/.installed
	$(RAY_VENV)/bin/python -P bench/ray_serve.py $(ARGS)

# Routing over 8 and 64 replicas in simulated time; no machine's speed is in its figures.
bench-replicas: setup
	$(BIN)/python -P bench/replicas.py $(ARGS)

# The documentation, into site/: reference pages from the code, then a strict build without network;
# a dead link fails it, and so does a broken list or anything that a page would load from another
# host.
docs: docs-tools
	$(GENERATE) docs/reference
	$(BIN)/zensical build --clean --strict
	$(GENERATE).links site
	$(GENERATE).lists docs site

# The same on http://127.0.0.1:8001, rebuilt at every change; the reference as it is at the start.
docs-serve: docs-tools
	$(GENERATE) docs/reference
	$(BIN)/zensical serve --dev-addr 127.0.0.1:8001

GENERATE := PYTHONPATH=docs $(BIN)/python -P -m generate

docs-tools: setup
	@$(BIN)/python -c 'import zensical, mkdocstrings' 2>/dev/null || \
	  $(BIN)/pip install --quiet --editable '.[docs]'

# An hour of mixed traffic and faults; the page with plots goes to bench/results/.
MINUTES ?= 60
soak: setup
	$(BIN)/python -P bench/soak.py --minutes $(MINUTES) $(ARGS)

# The signatures of FlashInfer's release in docker/locks/cuda.txt, to which make check binds our calls.
flashinfer-stub: setup
	$(BIN)/python -P tools/flashinfer_stub.py docker/locks/cuda.txt
	-$(BIN)/ruff check --quiet --fix stubs
	$(BIN)/ruff format --quiet stubs
	$(BIN)/ruff check stubs

# What images install, with hashes: docker/locks/*.txt, from pyproject.toml.
locks: setup
	@$(BIN)/python -c 'import uv' 2>/dev/null || $(BIN)/pip install --quiet --editable '.[images]'
	sh docker/locks/update.sh $(BIN)/uv

# BASE=python:3.12-slim@sha256:... names the base by digest.
BASE ?=
IMAGE_BASE := $(addprefix --build-arg BASE=,$(BASE))
image:
	docker build -f docker/Dockerfile.cpu $(IMAGE_BASE) -t gpuscore:cpu .

image-cuda:
	docker build -f docker/Dockerfile $(IMAGE_BASE) -t gpuscore:cuda .

image-tpu:
	docker build -f docker/Dockerfile.tpu $(IMAGE_BASE) -t gpuscore:tpu .

image-lint: setup
	@test -x $(BIN)/hadolint || $(BIN)/pip install --quiet --editable '.[images]'
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu docker/Dockerfile.tpu

# As root, on Debian with buildah, runc and mmdebstrap; no Docker daemon. It says what is missing.
image-test: setup
	$(BIN)/python -P docker/test/image_test.py $(addprefix --base ,$(BASE)) $(ARGS)

# Compose, Kubernetes, Prometheus and Grafana files against their own tools and schemas, and a real
# Prometheus that scrapes a real server; no Docker, no cluster. kubectl and Debian's prometheus come
# from elsewhere: make manifests-test PROMTOOL=/path/to/promtool
MANIFESTS_VENV := .venv-manifests
KUBECTL ?= kubectl
PROMTOOL ?= promtool
PROMETHEUS ?= prometheus

$(MANIFESTS_VENV)/.installed: docker/checks/requirements.txt
	$(PYTHON) -m venv $(MANIFESTS_VENV)
	$(MANIFESTS_VENV)/bin/python -m pip install --quiet -r $<
	@touch $@

manifests-test: setup $(MANIFESTS_VENV)/.installed
	GPUSCORE=$(BIN)/gpuscore KUBECTL=$(KUBECTL) PROMTOOL=$(PROMTOOL) PROMETHEUS=$(PROMETHEUS) \
	  $(MANIFESTS_VENV)/bin/pytest -p no:cacheprovider docker/checks

# Known vulnerabilities of what the images install. Needs PyPI's advisories; where they cannot be had,
# or a package is not found in them, that is an error too.
AUDIT_VENV := .venv-audit

$(AUDIT_VENV)/.installed:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/python -m pip install --quiet 'pip-audit>=2.9'
	@touch $@

audit: $(AUDIT_VENV)/.installed
	for lock in build cpu tpu cuda; do \
	  $(AUDIT_VENV)/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off \
	    --requirement docker/locks/$$lock.txt || exit; done

clean:
	rm -rf $(VENV) $(TRITON_VENV) $(TPU_VENV) site .cache docs/reference .venv-clients $(RAY_VENV) $(WEB_VENV) $(MANIFESTS_VENV) $(AUDIT_VENV) $(SCHEMATHESIS_VENV) $(FIXTURES_VENV) build dist \
	  *.egg-info .pytest_cache .mypy_cache .ruff_cache
