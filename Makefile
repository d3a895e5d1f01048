# make quickstart   install into .venv and run the quickstart study
# make check        install, lint and the tests that matter most, in two minutes
# make test         install and run the whole test suite
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install quickstart picture tables check test fuzz lint benchmark slurm browser
.DELETE_ON_ERROR:

install: $(STAMP)

# A venv whose Python has gone is made anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: PYTHON=$(PYTHON): needs Python >= 3.11"; exit 2; }
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --group dev
	@# Not with what it asks for: a torchvision that may be of another build than torch, and that tests have no use for.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps mup
	@touch $@

quickstart: install
	$(BIN)/stability-harness sweep study=quickstart
	$(BIN)/stability-harness report results/quickstart
	$(BIN)/stability-harness sweep study=incident
	$(BIN)/stability-harness report results/incident --postmortems 1

# The README's picture, from the quickstart's results.
picture: quickstart
	$(BIN)/stability-harness figure loss_against_rate results/quickstart docs/quickstart.svg

# The tables of the documentation, from what the files of mitigations and faults say of themselves.
tables: install
	$(BIN)/python -m sweeps.commands.tables docs/mitigations.md docs/faults.md docs/detection.md docs/recovery.md

# Three files of tests at a time, some of which wait for processes, and beside them the tests that wait for Slurm.
# Hundreds of processes load the project: what is compiled is kept.
test: export PYTHONDONTWRITEBYTECODE :=
test: install
	$(BIN)/python -m pytest --numprocesses 4 --dist loadscope --no-loadscope-reorder

# Lint, and the tests that matter most: promises, arithmetic against plain torch, faults, bad input. Some two minutes.
CHECKED := tests/test_architecture.py tests/harness/test_promises.py tests/harness/test_twins.py tests/harness/test_differential.py \
  tests/harness/test_row_clocks.py tests/harness/test_checkpoint.py tests/harness/test_loss.py tests/injectors/test_bits.py \
  tests/injectors/test_replay.py tests/analysis/test_statistics.py tests/analysis/test_metrics.py tests/sweeps/test_plan_table.py
check: lint
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadscope $(CHECKED)

# An hour of command lines, YAML files and damaged stores, each shrunk if it fails; `make test` tries a few.
fuzz: install
	$(BIN)/python -m tests.fuzz --minutes 60

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Ratios against a plain PyTorch loop in the same run; see docs/benchmarks.md.
benchmark: install
	$(BIN)/python -m tests.benchmarks.throughput
	$(BIN)/python -m tests.benchmarks.telemetry
	$(BIN)/python -m tests.benchmarks.signals
	$(BIN)/python -m tests.benchmarks.detection
	$(BIN)/python -m tests.benchmarks.recovery
	$(BIN)/python -m tests.benchmarks.pack_size
	$(BIN)/python -m tests.benchmarks.planning
	$(BIN)/python -m tests.benchmarks.scale
	$(BIN)/python -m tests.benchmarks.watch
	$(BIN)/python -m tests.benchmarks.attach
	$(BIN)/python -m tests.benchmarks.faults
	$(BIN)/python -m tests.benchmarks.mitigations
	$(BIN)/python -m tests.benchmarks.checkpoint
	$(BIN)/python -m tests.benchmarks.provenance
	$(BIN)/python -m tests.benchmarks.export

# A real two-node Slurm on this machine, from Debian's packages; needs root.
slurm:
	bash tests/slurm/cluster.sh up

# A browser for the tests that open pages; needs root. What speaks with it comes with the Python package playwright.
browser:
	@command -v chromium >/dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends chromium; }
