"""Queries: available backends, the launcher, this process's place on its host."""

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
    """Return True: this package needs nothing that could be missing."""
    return True


def is_mpi_available() -> bool:
    """Return whether the ``mpi`` backend can be used: whether mpi4py is installed."""
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Return whether the ``nccl`` backend can be used."""
    return is_backend_available("nccl")


def is_gloo_available() -> bool:
    """Return True: ``init_process_group("gloo")`` is accepted and means the default for the CPU."""
    return True


def is_torchelastic_launched() -> bool:
    """Return whether ``meshrun`` started this process."""
    return environment.RUN_ID in os.environ


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process' number among the ranks of its host, as its launcher says.

    Known are ``LOCAL_RANK`` and what Slurm, Open MPI and PMI launchers set; ranks of ``run_ranks``
    are on one host. Otherwise returns
    ``fallback_rank``, or raises RuntimeError when that is None. Raises LaunchEnvironmentError when
    a variable holds no number, TypeError when ``fallback_rank`` is none.
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
