# make quickstart   install into .venv and run the quickstart study
# make check        install, lint and the tests that matter most, in two minutes
# make test         install and run the whole test suite
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install docs linkcheck quickstart picture tables check test fuzz lint benchmark slurm browser gpu gpu-wheels gpu-figure
.DELETE_ON_ERROR:

install: $(STAMP)

# A venv whose Python has gone is made anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: PYTHON=$(PYTHON): needs Python >= 3.11"; exit 2; }
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --group dev --group docs
	@# Not with what they ask for: a torchvision that may be of another build than torch, and much that tests have no use
	@# for. Of three it is the rule by which their authors tell a spike, of trl and torchrl the losses of policies; torchrl
	@# loads the three behind it.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
	  mup ai2-olmo-core megatron-core trainscope trl torchrl tensordict pyvers hoptorch
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
	$(BIN)/python -m sweeps.commands.tables docs/mitigations.md docs/faults.md docs/detection.md docs/recovery.md docs/findings/numbers.md

# The site, in docs/_build/html: every tutorial is run, and a warning is an error. Nothing is fetched.
docs: install
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Whether outside links of the site answer: needs a network, and so is no part of `make test`.
linkcheck: install
	$(BIN)/sphinx-build --quiet --keep-going --builder linkcheck --define plot_gallery=0 docs docs/_build/linkcheck

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
	$(BIN)/mypy --no-warn-unused-ignores --allow-untyped-defs --allow-untyped-calls --allow-any-generics docs/*.py docs/tutorials/scripts/*.py

# Ratios against a plain PyTorch loop in the same run; see docs/benchmarks.md.
benchmark: install
	$(BIN)/python -m tests.benchmarks.throughput
	$(BIN)/python -m tests.benchmarks.jobs
	$(BIN)/python -m tests.benchmarks.telemetry
	$(BIN)/python -m tests.benchmarks.signals
	$(BIN)/python -m tests.benchmarks.detection
	$(BIN)/python -m tests.benchmarks.recovery
	$(BIN)/python -m tests.benchmarks.pack_size
	$(BIN)/python -m tests.benchmarks.planning
	$(BIN)/python -m tests.benchmarks.startup
	$(BIN)/python -m tests.benchmarks.scale
	$(BIN)/python -m tests.benchmarks.watch
	$(BIN)/python -m tests.benchmarks.attach
	$(BIN)/python -m tests.benchmarks.faults
	$(BIN)/python -m tests.benchmarks.mitigations
	$(BIN)/python -m tests.benchmarks.experts
	$(BIN)/python -m tests.benchmarks.checkpoint
	$(BIN)/python -m tests.benchmarks.provenance
	$(BIN)/python -m tests.benchmarks.export
	$(BIN)/python -m tests.benchmarks.seals
	$(BIN)/python -m tests.benchmarks.store

# The proof on a GPU and its figures, three groups of at most nine minutes each; see docs/gpu.md. Installs nothing: PYTHON is
# the Python that has torch. A group that fails does not keep the others from running.
GPU_OUT ?= results/gpu
gpu:
	@status=0; for group in bits speed large; do $(PYTHON) -m tests.gpu $$group --out $(GPU_OUT) || status=1; done; exit $$status

# One figure of the mission: LR sensitivity against width, four recipes, three seeds.
gpu-figure:
	$(PYTHON) -m tests.gpu figure

# What a GPU machine without a network may lack beside torch: wheels for its Python on Linux. Needs the network, here.
GPU_WHEELS := .gpu-wheels
GPU_PYTHON ?= 3.12
GPU_MOST := 64 # MiB
GPU_NEEDS := hydra-core zarr numpy safetensors google-crc32c platformdirs pebble filelock rich
GPU_DOWNLOAD = $(PYTHON) -m pip download --quiet --disable-pip-version-check --constraint constraints.txt \
  --python-version $(GPU_PYTHON) --implementation cp --only-binary=:all: --find-links $(GPU_WHEELS) --dest $(GPU_WHEELS) \
  $(foreach glibc,17 24 26 27 28 31 34,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64
gpu-wheels:
	rm -rf $(GPU_WHEELS)
	@# It comes as source alone.
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(GPU_WHEELS) antlr4-python3-runtime==4.9.3
	$(GPU_DOWNLOAD) $(GPU_NEEDS)
	@# Its needs are for downloads.
	$(GPU_DOWNLOAD) --no-deps tokenizers
	@size=$$(du -sm $(GPU_WHEELS) | cut -f1); echo "$(GPU_WHEELS): $$size MiB"; \
	test $$size -le $(GPU_MOST) || { echo "error: $(GPU_WHEELS): more than $(GPU_MOST) MiB"; exit 1; }

# A real two-node Slurm on this machine, from Debian's packages; needs root.
slurm:
	bash tests/slurm/cluster.sh up

# A browser for the tests that open pages; needs root. What speaks with it comes with the Python package playwright.
browser:
	@command -v chromium >/dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends chromium; }
