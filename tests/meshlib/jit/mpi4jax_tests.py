"""mpi4jax's own tests over ``meshlib.jit``, from a folder with mpi4jax's repository.

    python tests/meshlib/jit/mpi4jax_tests.py FOLDER [RANKS...]   1, 2 and 3 ranks by default

Each rank is a process that runs the tests with modules ``mpi4py`` and ``mpi4jax`` made here: a thin
adapter, which shows what a user of mpi4jax writes instead. Neither library has to be installed. The
tests of mpi4jax's own parts (logging, MPI's ABI, validation of types) are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

TESTS = ("tests/collective_ops", "tests/test_jax_transforms.py")
LEFT_OUT = {
    "test_common": "mpi4jax's logs, its ABI check and its text for MPI's errors",
    "test_sendrecv_jacfwd": "it asks for an error where meshlib has the derivative",
}
DIVIDES = {"test_alltoall_transpose": "its 256 rows have to divide by the number of ranks"}
LIMIT_SECONDS = 300.0


class Communicator:
    """``COMM_WORLD``: the default group."""

    def Get_rank(self) -> int:
        import meshlib as dist

        return dist.get_rank()

    def Get_size(self) -> int:
        import meshlib as dist

        return dist.get_world_size()

    rank, size = property(Get_rank), property(Get_size)


class Status:
    """The status of a message from ``recv``."""

    source = -1

    def Get_source(self) -> int:
        return self.source


def make_mpi() -> ModuleType:
    """Return what stands for ``mpi4py.MPI``."""
    from meshlib import ReduceOp

    module: Any = ModuleType("mpi4py.MPI")
    module.COMM_WORLD, module.Status = Communicator(), Status
    module.ANY_SOURCE = module.ANY_TAG = -1
    ops = {"SUM": "SUM", "PROD": "PRODUCT", "MIN": "MIN", "MAX": "MAX", "BAND": "BAND"}
    for name, ours in {**ops, "BOR": "BOR", "BXOR": "BXOR"}.items():
        setattr(module, name, getattr(ReduceOp, ours))
    return module


def make_mpi4jax() -> ModuleType:
    """Return what stands for ``mpi4jax``."""
    import jax.numpy as jnp

    from meshlib import ReduceOp, get_rank, get_world_size
    from meshlib import jit as mj

    module: Any = ModuleType("mpi4jax")

    def allgather(x, *, comm=None):
        return mj.all_gather(x)

    def barrier(*, comm=None):
        mj.barrier()

    def bcast(x, root, *, comm=None):
        return mj.broadcast(x, root)

    def scan(x, op, *, comm=None):
        return mj.scan(x, op)

    def send(x, dest, *, tag=0, comm=None):
        return mj.send(x, dest, tag=tag)

    def allreduce(x, op, *, comm=None):
        # All ranks compute one loss there.
        return mj.all_reduce(x, op, transpose="identity" if op is ReduceOp.SUM else "all_reduce")

    def reduce(x, op, root, *, comm=None):
        result = mj.reduce(x, root, op)
        return result if get_rank() == root else x

    def gather(x, root, *, comm=None):
        result = mj.gather(x, root)
        return result if get_rank() == root else x

    def scatter(x, root, *, comm=None):
        x = jnp.asarray(x)
        if get_rank() != root:
            x = jnp.zeros((get_world_size(), *x.shape), x.dtype)
        elif x.shape[:1] != (get_world_size(),):
            raise ValueError("Scatter input must have shape (nproc, ...)")
        return mj.scatter(x, root)

    def alltoall(x, *, comm=None):
        if x.shape[:1] != (get_world_size(),):
            raise ValueError("Alltoall input must have shape (nproc, ...)")
        return mj.all_to_all(x)

    def recv(x, source=-1, *, tag=-1, comm=None, status=None):
        if source != -1:
            x = mj.recv(x, source, tag=max(tag, 0))
        else:
            x, source = mj.recv_anysource(x, tag=max(tag, 0))
        if status is not None:
            status.source = source
        return x

    def sendrecv(sendbuf, recvbuf, source, dest, *, sendtag=0, recvtag=-1, comm=None, status=None):
        if status is not None:
            status.source = source
        assert recvtag in (-1, sendtag), "one tag for both"
        return mj.sendrecv(sendbuf, dest, source, like=jnp.asarray(recvbuf), tag=sendtag)

    module.__dict__.update(
        allreduce=allreduce,
        allgather=allgather,
        alltoall=alltoall,
        barrier=barrier,
        bcast=bcast,
        gather=gather,
        recv=recv,
        reduce=reduce,
        scan=scan,
        scatter=scatter,
        send=send,
        sendrecv=sendrecv,
    )
    return module


def run_rank(folder: Path) -> int:
    """Run the tests as one of the job's ranks; return pytest's exit code."""
    import pytest

    import meshlib as dist

    dist.init_process_group(timeout=30)
    mpi = make_mpi()
    sys.modules["mpi4py"] = SimpleNamespace(MPI=mpi)  # type: ignore[assignment]
    sys.modules["mpi4py.MPI"], sys.modules["mpi4jax"] = mpi, make_mpi4jax()
    os.chdir(folder)
    left_out = [*LEFT_OUT, *(() if 256 % dist.get_world_size() == 0 else DIVIDES)]
    # The first failure ends the job: the ranks' calls belong together.
    options = [
        "-q",
        "-x",
        "-k",
        " and ".join(f"not {name}" for name in left_out),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    options += ["-c", os.devnull]
    code = int(pytest.main([*options, f"--rootdir={folder}", *TESTS]))
    dist.destroy_process_group()
    return code


def run_job(folder: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """Run the tests on as many ranks; return how that ended, with what all of them printed."""
    command = [sys.executable, "-m", "meshlib", "run", f"--nproc-per-node={ranks}", __file__]
    return subprocess.run(
        [*command, "--rank", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def main() -> int:
    if sys.argv[1] == "--rank":
        return run_rank(Path(sys.argv[2]))
    folder = Path(sys.argv[1]).resolve()
    failed = 0
    for ranks in map(int, sys.argv[2:] or ("1", "2", "3")):
        job = run_job(folder, ranks)
        failed |= job.returncode
        print(f"{ranks} ranks: {'failed' if job.returncode else 'passed'}\n{job.stdout}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
