# `make help` lists the targets. Everything runs in .venv, made from uv.lock.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
DEMO ?= outputs/demo
# Of the tests on every cluster. Built before pytest, whose time limits are for the tests alone: it takes minutes.
E2E_TOOLS := kubectl helm prometheus prometheus-operator prometheus-config-reloader
export UV_PYTHON_DOWNLOADS := never

##@ Start here
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make .venv from the lock (fetches uv if it is missing)

demo: setup ## distil the embedded teacher on the CPU and evaluate: outputs/demo/report.html
	$(RUN) -m wandistill train --config wandistill/demo/demo.yaml --output_dir $(DEMO)
	$(RUN) -m wandistill evaluate $(DEMO)

##@ Checks
lint: setup ## ruff, types and the torch boundary
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

test: setup ## all tests that need no GPU and no cluster
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not demo and not slow and not cluster" --ignore tests/chart --numprocesses auto --dist loadfile

test-slow: setup ## worlds of processes that are killed: every placement, real memory limits, several nodes
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m slow --ignore tests/chart

demo-others: setup ## after the demo: a quarter-size student in the same time, and one that is not trained
	$(RUN) -m wandistill train --config wandistill/demo/demo.yaml --student_config quarter --init average --max_steps 500 \
	  --cache_dir $(DEMO)/cache --output_dir $(DEMO)-quarter
	$(RUN) -m wandistill evaluate $(DEMO)-quarter
	$(RUN) -m wandistill train --config wandistill/demo/demo.yaml --max_steps 1 --lr 1e-12 \
	  --cache_dir $(DEMO)/cache --output_dir $(DEMO)-untrained
	$(RUN) -m wandistill evaluate $(DEMO)-untrained

test-demo: setup ## the tests that read the outputs of `make demo demo-others`
	$(RUN) -m pytest -m demo

test-chart: setup ## the chart: lint, every preset, refusals, tables against the planner (helm from PATH, or built with Go)
	$(RUN) -m tests.tools.build helm kubeconform kind
	$(RUN) -m pytest tests/chart

test-metrics: setup ## promtool on rules and alerts, a real Prometheus on every panel (both built with Go)
	$(RUN) -m tests.tools.build promtool prometheus
	$(RUN) -m pytest tests/metrics/promtool_checks.py tests/metrics/prometheus_checks.py

##@ Kubernetes
image: ## build the images `control` and `train`: IMAGE, TAG and BUILD_ARGS as docker/build.sh says
	docker/build.sh

kind: setup ## start a cluster of kind with the images and the training operator, where Docker or podman runs
	$(RUN) -m tests.cluster.kind up

e2e: setup ## the cluster tests, on the cluster of KUBECONFIG, or on a cluster that is started here
	$(RUN) -m tests.tools.build $(E2E_TOOLS)
	$(RUN) -m tests.cluster.clusters up
	OMP_NUM_THREADS=1 $(RUN) -m pytest -p no:xdist -m "cluster and not full" tests/cluster

e2e-full: setup ## the same with the scenarios that take long or change seldom
	$(RUN) -m tests.tools.build $(E2E_TOOLS) kwok kueue registry
	$(RUN) -m tests.cluster.clusters up
	OMP_NUM_THREADS=1 $(RUN) -m pytest -p no:xdist -m cluster tests/cluster

e2e-down: setup ## end the cluster that `make e2e` or `make kind` started, and remove all that it made
	$(RUN) -m tests.cluster.clusters down

##@ Work on the code
generate: setup ## renew what is made from the code: README's tree and tables, dashboards, the chart's tables, k8s/
	$(RUN) -m wandistill.metrics.dashboards helm/wandistill/dashboards
	$(RUN) -m tests.readme_metrics --write
	$(RUN) -m tests.readme_bench --write
	$(RUN) -m tests.readme_tree --write
	$(RUN) -m tests.generate_chart --write

verify: setup ## fail where `make generate` would change something
	$(RUN) -m tests.readme_tree --check
	$(RUN) -m tests.readme_metrics --check
	$(RUN) -m tests.readme_bench --check
	$(RUN) -m tests.generate_chart

bench: setup ## on the CPU: the trainer over bare forward and backward; placements over the resident teacher
	$(RUN) -m tests.bench_overhead
	$(RUN) -m tests.cpu.bench_engine

bench-gpu: setup ## every placement against resident and the peers, 14B-shaped, on the GPUs that are here
	$(RUN) -m tests.gpu.bench

bench-metrics: setup ## what snapshots and scrapes cost, alone and as a share of a run, and that they leak nothing
	$(RUN) -m tests.bench_metrics
	$(RUN) -m tests.bench_metrics_share

clean: ## remove everything that was made here
	rm -rf $(VENV) .uv outputs dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.installed: pyproject.toml uv.lock
	@command -v $(UV) >/dev/null || { $(PYTHON) -m venv .uv && .uv/bin/python -m pip install --quiet uv; }
	# Compiled once: an import of torch and diffusers takes over twice as long where every process compiles them, as
	# pods do, which may not write here, and whoever has PYTHONDONTWRITEBYTECODE set.
	$(UV) sync --frozen --all-extras --compile-bytecode --python $(PYTHON)
	@touch $@

.PHONY: help setup demo demo-others lint test test-slow test-demo test-metrics test-chart image kind e2e e2e-full e2e-down generate verify bench bench-gpu bench-metrics clean
