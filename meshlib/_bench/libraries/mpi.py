"""MPI through mpi4py, with its fastest calls: on buffers, and in place if possible."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, ClassVar

from meshlib._bench.cases import ROOT, Bound, Case
from meshlib._bench.libraries.library import Library, ping_pong


class MpiLibrary(Library):
    """The MPI of the environment, whose launcher sets each rank's number."""

    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm: Any = self._mpi.COMM_WORLD

    def host(self, size: int) -> int:
        return 0

    def join(self, port: int, rank: int, size: int) -> None:
        found = self._comm.Get_rank(), self._comm.Get_size()
        if found != (rank, size):
            raise RuntimeError(f"{self.name} says rank {found[0]} of {found[1]}, not {rank}/{size}")

    def barrier(self) -> object:
        return self._comm.Barrier()

    def bind(self, case: Case) -> Bound:
        mpi, comm = self._mpi, self._comm
        x = [case.input, mpi.FLOAT]
        out = [case.output, mpi.FLOAT] if case.has_output else x
        in_place, is_root = mpi.IN_PLACE, case.rank == ROOT
        sent, received = (in_place, x) if is_root else (x, None)
        calls: dict[str, Bound] = {
            "all_reduce": lambda: comm.Allreduce(in_place, x),
            "broadcast": lambda: comm.Bcast(x, ROOT),
            "reduce": lambda: comm.Reduce(sent, received, root=ROOT),
            "all_gather": lambda: comm.Allgather(x, out),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out),
            "all_to_all": lambda: comm.Alltoall(x, out),
            "gather": lambda: comm.Gather(x, out if is_root else None, ROOT),
            "scatter": lambda: comm.Scatter(x if is_root else None, out, ROOT),
            "barrier": comm.Barrier,
            "ping_pong": ping_pong(case.rank, partial(comm.Send, x), partial(comm.Recv, out)),
        }
        if case.name not in calls:
            raise ValueError(f"case {case.name!r} has no call in MPI")
        return calls[case.name]

    def version(self) -> str:
        name, numbers = self._mpi.get_vendor()
        mpi4py = importlib.import_module("mpi4py")
        return f"{name} {'.'.join(map(str, numbers))}, mpi4py {mpi4py.__version__}"

    def leave(self) -> None:
        self._mpi.Finalize()


class OpenMpi(MpiLibrary):
    """Open MPI."""

    name = "openmpi"
    launcher: ClassVar[tuple[str, ...]] = ("mpirun", "--allow-run-as-root", "--oversubscribe")
    rank_variable = "OMPI_COMM_WORLD_RANK"


class Mpich(MpiLibrary):
    """MPICH."""

    name = "mpich"
    launcher: ClassVar[tuple[str, ...]] = ("mpiexec",)
    rank_variable = "PMI_RANK"
