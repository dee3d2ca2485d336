# make demo: install into .venv, with torch's CPU build, and train on 8 workers.
# make test: install the test extras and run the fast tests, some of every part.   make test-slow: all others, and the zoo.
# make test-all: the fast tests and test-share, one of twelve slow ones, others every day.
# make lint: ruff, mypy, and linters of Dockerfile and compose.yaml.   make package: build and try the package.   make bench: start-up time against torchrun.
# make mindspore: jobs of real MindSpore, which it installs into .venv-mindspore.
# make docs: the site, in docs/_build; warnings are errors.   make mutants: whether the tests notice small faults.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The newest set of packages that passed the tests.
export CONSTRAINTS ?= constraints.txt
# Modules are compiled as they are imported and kept, here and for tests; all of torch's would take longer than the demo.
INSTALL := $(BIN)/python .ci/install.py
export PYTHONDONTWRITEBYTECODE :=
# Asked for torch beside pip's own index when it can be reached; TORCH_INDEX= for pip's own alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The pip of PYTHON, where it has one, takes half the time of venv's own way to make another.
PIP_FROM_OUTSIDE := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python install --quiet --no-compile \
	--no-warn-script-location --root-user-action ignore -c $(CONSTRAINTS) pip uv
# Where the console scripts are; run.sh finds msrun on PATH.
RUN := PATH="$(abspath $(BIN)):$$PATH"

.PHONY: demo test test-slow test-share test-all zoo mindspore mutants lint package docs bench clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	@{ $(PYTHON) -m venv --without-pip $(VENV) && $(PIP_FROM_OUTSIDE); } 2>/dev/null \
	  || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); echo "python3-venv is missing, trying to install it"; \
	  apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); } \
	  || { rm -rf $(VENV); echo "as root: apt-get install python3-venv"; exit 1; }

$(VENV)/.torch: $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) --torch "$(TORCH_INDEX)"
	@touch $@

# What a worker imports is compiled meanwhile: one process imports, another compiles what that comes to last.
TORCH_PARTS := _dynamo _functorch fx export distributed/fsdp distributed/tensor distributed/pipelining
$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(VENV)/.torch
	$(BIN)/python -c 'import torch._dynamo, torch._functorch.aot_autograd, torch.distributed.fsdp, torch.distributed.pipelining' & \
	{ $(BIN)/python -c 'import networkx, sympy'; \
	  $(BIN)/python -m compileall -q msrun $(addprefix $(VENV)/lib/*/site-packages/torch/,$(TORCH_PARTS)); } & \
	$(INSTALL) --no-build-isolation -e '.[runtime,examples]'; status=$$?; wait; exit $$status
	@touch $@

$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(VENV)/.torch
	$(INSTALL) --quiet --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(INSTALL) --quiet --no-build-isolation -e '.[lint]'
	@touch $@

$(VENV)/.zoo: $(VENV)/.test
	$(INSTALL) --quiet --no-build-isolation -e '.[test,zoo]'
	@touch $@

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/.torch
	$(INSTALL) --quiet --no-build-isolation -e '.[docs]'
	@touch $@

demo: $(VENV)/.demo
	$(RUN) EPOCHS=1 bash examples/torch/mnist/run.sh
	@echo
	@echo "logs: examples/torch/mnist/log_output"
	@ls examples/torch/mnist/log_output
	@echo "last losses of worker 0:"
	@tail -n 3 examples/torch/mnist/log_output/worker_0.log

# Files in the order of their names, from both ends: those in tests/e2e wait, so that there are more of them at a time
# than cores, and the last ones compute beside them.
TEST_WORKERS ?= $(shell echo $$(( $$(nproc) * 2 )))
PYTEST := $(RUN) python -m pytest --workers $(TEST_WORKERS) $(PYTEST_OPTIONS)

test: export MSRUN_FUZZ_CASES ?= 3
test: export MSRUN_CHAOS_SEED ?= 1
test: $(VENV)/.test
	$(PYTEST) --ignore=tests/zoo -m "not slow" --hypothesis-profile=fast

# What make test leaves out, models of other packages, and more random networks, others every day;
# MSRUN_FUZZ_SEED=... repeats a day. So of jobs whose processes are killed at random: MSRUN_CHAOS_SEED, MSRUN_CHAOS_CASES.
# MSRUN_SLOW_SHARE=12 runs one of twelve slow tests, MSRUN_SLOW_SEED says which.
test-slow: export MSRUN_FUZZ_CASES ?= 150
test-slow: export MSRUN_FUZZ_SEED ?= $(shell date +%Y%m%d)
test-slow: export MSRUN_CHAOS_CASES ?= 120
test-slow: export MSRUN_CHAOS_SEED ?= $(shell date +%Y%m%d)
test-slow: export MSRUN_SLOW_SHARE ?= 1
test-slow: export MSRUN_CAPTURE_CACHE ?= off
test-slow: export MSRUN_SLOW_SEED ?= $(shell date +%Y%m%d)
test-slow: $(VENV)/.zoo
	@echo "slow tests: MSRUN_SLOW_SHARE=$(MSRUN_SLOW_SHARE) MSRUN_SLOW_SEED=$(MSRUN_SLOW_SEED)"
	@echo "random networks: MSRUN_FUZZ_SEED=$(MSRUN_FUZZ_SEED) MSRUN_FUZZ_CASES=$(MSRUN_FUZZ_CASES)"
	$(PYTEST) -m "slow or random" tests/zoo tests/e2e tests/unit tests/test_guards.py

test-share:
	$(MAKE) test-slow MSRUN_SLOW_SHARE=12 MSRUN_FUZZ_CASES=12 MSRUN_CHAOS_CASES=30

test-all: test test-share

# Real MindSpore, in an environment of its own: jobs of it under msrun, and msrun.mindspore beside it.
MINDSPORE := .venv-mindspore
$(MINDSPORE)/.done: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(MINDSPORE)
	$(MINDSPORE)/bin/python .ci/install.py --torch "$(TORCH_INDEX)"
	$(MINDSPORE)/bin/python -m pip --disable-pip-version-check install --quiet mindspore==2.10.0 'numpy<2'
	$(MINDSPORE)/bin/python -m pip --disable-pip-version-check install --quiet -e '.[runtime]' 'numpy<2'
	@touch $@

mindspore: $(MINDSPORE)/.done $(VENV)/.test
	$(RUN) MINDSPORE_PYTHON="$(abspath $(MINDSPORE)/bin/python)" REQUIRE=mindspore python -m pytest tests/e2e/test_mindspore_scripts.py tests/e2e/test_mindspore_forms.py tests/unit/mindspore/test_mindspore_calls.py

zoo: $(VENV)/.zoo
	$(RUN) python -m pytest tests/zoo

# Small faults in the launcher, the graph and the rank-table rules: do the tests notice? MUTANTS=120: so many; MUTANTS_SEED=... repeats a day.
mutants: export MUTANTS ?= 60
mutants: export MUTANTS_SEED ?= $(shell date +%Y%m%d)
mutants: $(VENV)/.test
	cd tests && PATH="$(abspath $(BIN)):$$PATH" python -m mutants --number $(MUTANTS) --seeds $(MUTANTS_SEED)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	[ ! -x $(BIN)/hadolint ] || $(BIN)/hadolint Dockerfile

package: $(VENV)/.lint
	.ci/try_package $(abspath $(BIN))/python

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build
	@echo "docs/_build/index.html"

bench: $(VENV)/.test
	$(RUN) python benchmarks/launch.py

clean:
	rm -rf $(VENV) build docs/_build *.egg-info examples/data examples/*/log_output examples/*/checkpoints
