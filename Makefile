# Everything that people and CI run. `make demo` and `make test` set up all they need, from a fresh Debian machine on.

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
# Torch workers share few cores here; more threads than cores only make them wait for each other.
export OMP_NUM_THREADS ?= 1
# Without compiled files each of the thousand processes that tests start would compile dtctl again.
unexport PYTHONDONTWRITEBYTECODE
# Tests on virtual hosts often wait for processes, so two more than there are cores; each has a sandbox of its own. The
# longest modules begin first; see tests/conftest.py. (nproc would count OMP_NUM_THREADS.)
HOSTS_TESTS := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2) --dist loadfile --no-loadscope-reorder --durations=15

.PHONY: help demo test test-lowest test-slow check unit integration test-frameworks soak fuzz bench gate dist-check gpu clean
.DEFAULT_GOAL := help

help:  ## Show what there is to make.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(BIN)/.ready: pyproject.toml constraints.txt .ci/setup.sh
	VENV=$(VENV) PYTHON=$(PYTHON) bash .ci/setup.sh
	@touch $@ $(BIN)/.ready-for-demo

$(BIN)/.ready-for-demo: pyproject.toml constraints.txt .ci/setup.sh
	VENV=$(VENV) PYTHON=$(PYTHON) bash .ci/setup.sh demo
	@touch $@

demo: $(BIN)/.ready-for-demo  ## Train a small GPT on 3 virtual hosts, kill a worker, watch it recover.
	$(BIN)/python examples/demo.py

test: $(BIN)/.ready check  ## Everything but the slow tests; a quarter of an hour on two cores.
	$(BIN)/python -m pytest tests/unit tests/golden tests/cli tests/security -q -m "not slow" -n auto --dist loadfile
	$(BIN)/python -m pytest tests/integration tests/fault -q -m "not slow" $(HOSTS_TESTS)

test-lowest: $(BIN)/.ready  ## Unit and CLI tests with the oldest Python and packages that dtctl allows; three minutes.
	VENV=$(VENV) bash .ci/lowest.sh

test-slow: $(BIN)/.ready  ## The slow tests, which CI runs, too.
	$(BIN)/python -m pytest tests/unit tests/golden tests/cli tests/security tests/integration tests/fault -q -m slow $(HOSTS_TESTS)

unit: $(BIN)/.ready  ## The tests that need neither a network nor a training.
	$(BIN)/python -m pytest tests/unit tests/golden tests/cli -q -m "not slow and not torch" --ignore tests/unit/runtime -n auto --dist loadfile

integration: $(BIN)/.ready  ## The tests on virtual hosts, but for the slow ones.
	$(BIN)/python -m pytest tests/integration tests/fault -q -m "not slow" $(HOSTS_TESTS)

test-frameworks: $(BIN)/.ready  ## Accelerate, DeepSpeed, Lightning and Megatron-Core, each in an environment of its own; minutes and gigabytes.
	$(BIN)/python -m pytest tests/frameworks -q --durations=15

check: $(BIN)/.ready  ## Style, types, layers, documentation.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: $(BIN)/.ready  ## Kill trainings at random for an hour; each must end with the bits of one left alone.
	$(BIN)/python -m tests.fault.stopping --count 50
	$(BIN)/python -m tests.fault.soak
	$(BIN)/python -m tests.fault.last_second --count 200
	$(BIN)/python -m tests.fault.live --count 100
	$(BIN)/python -m tests.fault.live --count 100 --shape 2x2
	$(BIN)/python -m tests.fault.live --count 100 --shape 2x2 --strategy hsdp
	$(BIN)/python -m tests.fault.live --count 52 --kills 52 --shelter
	$(BIN)/python -m tests.fault.memory --count 20 --mesh fsdp=4
	$(BIN)/python -m tests.fault.memory --count 20 --mesh dp=2,tp=2
	$(BIN)/python -m tests.fault.memory --count 20 --mesh pp=2 --shape 2x1
	DTCTL_SOAK=1 $(BIN)/python -m pytest tests/integration/test_repeated.py tests/unit/runtime/test_session_workers.py -q -m slow
	$(BIN)/python -m tests.fault.zoo
	$(BIN)/python -m tests.fault.programs
	$(BIN)/python -m tests.fault.programs --draws 300

fuzz: $(BIN)/.ready  ## Read 100,000 odd inputs of each sort that comes from elsewhere; most of an hour.
	$(BIN)/python -m tests.security.fuzz --count 100000

bench: $(BIN)/.ready  ## Launch latency and push beside other launchers; takes some minutes on an idle machine.
	$(BIN)/python benchmarks/launch.py

gate: $(BIN)/.ready  ## What became slower since BASE (default: where the branch started), pair by pair; 15 minutes, idle machine.
	$(BIN)/python benchmarks/gate.py $(BASE)

dist-check: $(BIN)/.ready  ## What a release needs: packages that install and run elsewhere, and figures of today on the front page.
	$(BIN)/python .ci/dist_check.py
	$(BIN)/python benchmarks/ages.py --check

gpu: $(BIN)/.ready  ## What only a GPU can show, in 16 checks; 8 to 11 minutes on an H100, results in benchmarks/results.
	$(BIN)/python -m benchmarks.gpu

clean:  ## Remove what was made here.
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
	  .grimp_cache benchmarks/.venv-peers examples/*/.dtctl
