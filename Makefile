# Every target sets itself up in .venv; nothing but make and a Python with venv has to be there.
PYTHON ?= python3
# How many tests run at once.
JOBS ?= 2
SPREAD = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
QUICK := -m "not slow and not nightly"
VENV := .venv
# The torch that is installed there. A nightly job takes the lowest and the highest that Relay supports.
TORCH ?= torch==2.13.*
TORCH_STAMP := $(VENV)/$(subst *,x,$(subst =,-,$(TORCH)))
INSTALLED := $(VENV)/installed
INSTALL := pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: cluster device-plane device-plane-all docs drawing ends faults help demo unit test slow nightly check coverage mutation ray bench bench-tiny clean

help:
	@echo "make demo     train a character GPT as a two-stage pipeline on two CPU processes (about two minutes)"
	@echo "make unit     run the tests that start no process (a minute)"
	@echo "make test     run all tests except those marked slow or nightly (about four minutes)"
	@echo "make slow     run the tests marked slow (about a quarter of an hour); .ci/run runs these too"
	@echo "make nightly  run the tests marked nightly, the rest of long sweeps (about an hour)"
	@echo "make device-plane run tests of parity over the simulated device plane (half a minute); device-plane-all: all of them"
	@echo "make check    lint, format, types and the layers of imports"
	@echo "make docs     build the documentation as a site in build/site; a broken link is an error"
	@echo "make drawing  compare classes of public packages, drawn by the seed of the day or SEED=..., with one process (a quarter of an hour)"
	@echo "make faults   disturb 1,000 small runs by random faults (two hours); it continues where it was interrupted"
	@echo "make ray      install Ray into .venv and train under it (some minutes)"
	@echo "make cluster  run jobs on a SLURM of two hosts in namespaces (root; munge, slurmctld, slurmd, slurm-client, iproute2; a quarter of an hour)"
	@echo "make ends     show how 200 runs of torchrun end, beside as many of Lightning's DDP (an hour)"
	@echo "make coverage run each test file under coverage (about an hour) and print what no test reaches"
	@echo "make mutation test 60 one-line defects in strategies/ (hours; after make coverage)"
	@echo "make bench    run the benchmarks (about an hour) and write benchmarks/results.md"
	@echo "make bench-tiny run every section of the benchmarks at its smallest, into build/bench-tiny (some minutes)"
	@echo "make clean    remove .venv"

demo: $(INSTALLED)
	python -m trainer fit --config configs/pipeline.yaml

# The tests of a file stay in one process, since many share what one launch of processes has computed. tests/conftest.py
# puts the longest files first.
unit: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest tests/unit $(QUICK) $(SPREAD)

test: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest $(QUICK) $(SPREAD)

# Of the tests of parity, the most telling ones for the order of sends and receives; a nightly job runs all of them.
DEVICE_PLANE = $(addprefix tests/integration/parity/,values/test_evaluation.py values/test_parity_calls.py training/test_parity_gradients.py values/test_parity_inputs.py schedules/test_parity_1f1b.py)

device-plane: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest --data-plane=simulated-serial $(QUICK) $(DEVICE_PLANE) $(SPREAD)

device-plane-all: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest --data-plane=simulated-serial tests/integration/parity $(SPREAD)

slow nightly: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest -m $@ $(SPREAD) --durations 40

ray: $(INSTALLED)
	$(INSTALL) -e '.[ray]'
	OMP_NUM_THREADS=1 python -m pytest -m nightly tests/integration/launch/test_ray.py

# Where a cluster cannot run, the tests are skipped; here that is an error.
cluster: $(INSTALLED)
	PYTHONPATH=tests/helpers python -c "from slurm_cluster import CAN_HAVE_CLUSTER, NO_CLUSTER; CAN_HAVE_CLUSTER or exit(NO_CLUSTER)"
	OMP_NUM_THREADS=1 python -m pytest -m nightly tests/integration/launch/test_cluster.py

check: $(INSTALLED)
	ruff check .
	ruff format --check .
	mypy
	lint-imports

docs: $(INSTALLED)-docs
	python .ci/options_page.py --check
	NO_MKDOCS_2_WARNING=1 mkdocs build

faults: $(INSTALLED)
	mkdir -p build/faults
	OMP_NUM_THREADS=1 python -m tests.faults.simulator --seed 0 --count 1000 --resume build/faults/verdicts.jsonl --report build/faults/report.md

drawing: $(INSTALLED)-drawing
	mkdir -p build/drawing
	OMP_NUM_THREADS=1 python -m tests.drawing $(if $(SEED),--seed $(SEED)) --report build/drawing/report.md

coverage: $(INSTALLED)
	python -m tests.mutation.measure

mutation: $(INSTALLED)-mutation
	python -m tests.mutation --seed 0 --count 60 --jobs 2

bench: $(INSTALLED)-bench
	python -m benchmarks

ends: $(INSTALLED)
	python -m benchmarks ends --limit=12000 --into=build/ends

bench-tiny: $(INSTALLED)
	python -m benchmarks --tiny --rounds=1 --into=build/bench-tiny

# The stamp is written last, so that an interrupted installation is taken up again. `compat` puts the checkout itself on
# the path, not only the two packages: the scripts in examples/ import their model from there, wherever they are run.
$(INSTALLED): pyproject.toml $(TORCH_STAMP)
	@echo "Setting up $(VENV): some minutes the first time"
	@$(INSTALL) '$(TORCH)' -e '.[dev]'
	@touch $@

$(TORCH_STAMP):
	@$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/torch--*
	@touch $@

$(INSTALLED)-bench: $(INSTALLED)
	@$(INSTALL) -e '.[bench]'
	@touch $@

$(INSTALLED)-docs: $(INSTALLED)
	@$(INSTALL) -e '.[docs]'
	@touch $@

$(INSTALLED)-drawing: $(INSTALLED)
	@$(INSTALL) -e '.[drawing]'
	@touch $@

$(INSTALLED)-mutation: $(INSTALLED)
	@$(INSTALL) -e '.[mutation]'
	@touch $@

clean:
	rm -rf $(VENV)
