"""Queries: available backends, the launcher, this process's local rank."""

from __future__ import annotations

import os

import numpy as np

from meshlib._arrays.checks import check_op
from meshlib._groups.backend import is_backend_available
from meshlib._job.thread_rank import thread_rank
from transport import _environment as environment
from transport._checks import to_whole_number
from transport._launch_environments import launched_local_rank
from transport._operands.reduce_op import ReduceOp


def is_available() -> bool:
    """Return True: the package is always available."""
    return True


def is_mpi_available() -> bool:
    """Return whether the ``mpi`` backend can be used: whether mpi4py is installed."""
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Return whether the ``nccl`` backend can be used."""
    return is_backend_available("nccl")


def is_gloo_available() -> bool:
    """Return True: ``init_process_group("gloo")`` selects the default CPU backend."""
    return True


def is_torchelastic_launched() -> bool:
    """Return whether ``meshrun`` started this process."""
    return environment.RUN_ID in os.environ


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's number among the ranks of its host, according to its launcher.

    It reads ``LOCAL_RANK`` and the variables of Slurm, Open MPI and PMI launchers; ranks of
    ``run_ranks`` are on one host. If none is set, it returns ``fallback_rank``, or raises
    RuntimeError if that is None. Raises LaunchEnvironmentError if a variable does not hold a
    number, TypeError if ``fallback_rank`` is not an integer.
    """
    mine = thread_rank()
    local_rank = launched_local_rank() if mine is None else mine.rank
    if local_rank is not None:
        return local_rank
    if fallback_rank is not None:
        return to_whole_number(fallback_rank, "fallback_rank")
    raise RuntimeError(
        f"the local rank is unknown: environment variable {environment.LOCAL_RANK} is not set; "
        "expected it, or fallback_rank"
    )


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether ``reduceOp`` is defined on complex numbers."""
    try:
        check_op(reduceOp, np.dtype(np.complex64))
    except TypeError:
        return False
    return True
