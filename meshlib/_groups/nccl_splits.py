"""Groups whose NCCL communicators are split from an existing group's.

Experimental, not run on a GPU (``docs/run/gpu.md``).

NCCL connects a new communicator from scratch: members exchange addresses, and each pair connects.
Since NCCL 2.18, ``ncclCommSplit`` reuses a communicator's connections, but all of its members must
call it, including those in no new group. In this library only members make a group. So only
``init_device_mesh`` and ``split_group``, which all members of the parent call, split communicators.
As in c10d, ``init_process_group`` must have got a ``device_id``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlib._calls.spec import CallSpec
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._cuda.driver import Driver
from transport._operands.reduce_op import ReduceOp

if TYPE_CHECKING:
    from transport._nccl import NcclCommunicator

NCCL = "nccl"


def connect(group: ProcessGroup, driver: Driver, device: int) -> None:
    """Connect the NCCL communicator of ``group`` now, if it has one; all members must call it."""
    if group.backends.get("cuda") != NCCL:
        return

    def run(communicator: Communicator[Any], call: Call) -> None:
        _nccl(communicator).connect(call, driver, device)

    call_queue_of(group).issue(CallSpec(Kind.SPLIT, run, device="cuda"))


def split(parent: ProcessGroup, child: ProcessGroup | None, parts: Sequence[Sequence[int]]) -> bool:
    """Split the communicator of ``child`` (None: this rank is in no part) from ``parent``'s.

    Every member of ``parent`` must call it, with equal ``parts``, which are global ranks. Returns
    whether the split was made; if not, ``child`` connects at its first call, like any group.
    """
    if parent.backends.get("cuda") != NCCL:
        return False
    can = child is None or (
        child.backends.get("cuda") == NCCL
        and "cuda" not in call_queue_of(child).state.communicators
    )
    state = np.array([can], np.int8)
    parent.all_reduce(state, ReduceOp.MIN)
    if not state[0]:
        return False

    def run(communicator: Communicator[Any], call: Call) -> bool:
        if child is None:
            return _nccl(communicator).split(call, None, None)
        inner: Communicator[Any] = call_queue_of(child).state.communicator("cuda")
        return _nccl(communicator).split(call, inner.membership, inner)

    same = zlib.crc32(repr(parts).encode())
    return call_queue_of(parent).issue(CallSpec(Kind.SPLIT, run, extra=same, device="cuda"))


def _nccl(communicator: Communicator[Any]) -> NcclCommunicator:
    from transport._nccl import NcclCommunicator  # a job without GPUs does not load it

    assert isinstance(communicator, NcclCommunicator)
    return communicator
