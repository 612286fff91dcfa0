# Two commands do all the set-up: `make demo` shows the main job, `make test` runs all tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo chaos test check lock slice bench-proxy peers load compare results results-quick clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(READY)  ## real traffic through the router to four simulated replicas, three rules compared; KEEP=1 goes on serving
	@$(BIN)/tfirst demo $(if $(KEEP),--keep)

chaos: $(READY)  ## replicas and router under load while they fail: make chaos ARGS="--phase killed --json"
	@$(BIN)/python -m loadtest.chaos $(ARGS)

test: $(READY)  ## run all tests
	$(BIN)/python -m pytest

check: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

lock:  ## write requirements.lock anew from pyproject.toml (needs pip-tools)
	pip-compile --quiet --strip-extras --extra dev --extra tokenizers --generate-hashes --allow-unsafe --no-emit-index-url \
	  --no-emit-find-links --no-emit-trusted-host --output-file requirements.lock pyproject.toml

slice: $(READY)  ## cut the demo's traffic anew: make slice TRACE=conversation_trace.jsonl.gz
	$(BIN)/python -m loadtest.replay.slices --trace $(TRACE) --fleet loadtest/demo/fleet.yaml \
	  --out loadtest/demo/traffic.jsonl.gz

bench-proxy: $(READY)  ## what a request costs here, in nginx and in the Rust routers: PEERS=folder installs those
	$(BIN)/python -m loadtest.bench_proxy --out runs/bench-proxy.json $(if $(PEERS),--peers-venv $(PEERS))

peers: $(READY)  ## the same fleet and load behind other routers too, installed into PEERS=folder (default runs/peers)
	$(BIN)/python -m loadtest.peers --peers-venv $(or $(PEERS),runs/peers) --out runs/peers.json

load: $(READY)  ## users by Locust: make load URL=http://HOST:PORT SCENARIO=chat USERS=30 FOR_S=120
	$(BIN)/locust -f loadtest/scenarios/$(or $(SCENARIO),chat).py --host $(or $(URL),http://127.0.0.1:30000) --headless --only-summary \
	  -u $(or $(USERS),30) -r $(or $(USERS),30) -t $(or $(FOR_S),120) --stop-timeout 60

compare: $(READY)  ## one scenario on two addresses: make compare A=http://HOST:PORT B=http://HOST:PORT SCENARIO=chat
	$(BIN)/python -m loadtest.compare $(or $(SCENARIO),chat) A=$(A) B=$(B) -- \
	  -u $(or $(USERS),30) -r $(or $(USERS),30) -t $(or $(FOR_S),120) --stop-timeout 60

results: $(READY)  ## every rule on both traces and on a mixed fleet, hours: make results TRACES=folder JOBS=2
	$(BIN)/python -m loadtest.replay.contest --traces $(TRACES) --jobs $(or $(JOBS),1) --out runs/results --page docs/results.md

results-quick: $(READY)  ## the same questions on small slices in a few minutes
	$(BIN)/python -m loadtest.replay.contest --quick --jobs $(or $(JOBS),1) --out runs/results-quick

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# The environment is made from the lock file alone; the project itself is installed without looking anything up.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "tfirst needs Python 3.11 or newer as $(PYTHON); try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "making the environment in $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)
