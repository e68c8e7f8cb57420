"""What a peer writes into shared memory is checked before use, and nobody can cut memory off."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from rank_threads import Member, Transport, run_group

from transport.call import Kind
from transport.errors import DistBackendError, DistError, PeerLostError
from transport.native import core
from transport.operands.reduce_op import ReduceOp
from transport.shm import ShmCommunicator
from transport.shm.board.layout import Sizes
from transport.shm.board.patience import Patience
from transport.shm.board.segment import OwnedSegment, adopt
from transport.shm.collectives.arena import Arena

SIZES = Sizes(block=1 << 12, direct=64, ring=1 << 12, piece=256)
SHM = Transport("shm", lambda membership, _: ShmCommunicator(membership, SIZES), has_links=False)
COUNT = 3000


def _make_call(member: Member, kind: Kind, array: Any) -> None:
    call = member.call(kind, array.dtype, COUNT, root=1 if kind is Kind.BROADCAST else -1)
    if kind is Kind.BROADCAST:
        member.comm.broadcast(call, array, 1)
    elif kind is Kind.ALL_GATHER:
        member.comm.all_gather(call, [np.empty_like(array) for _ in range(member.size)], array)
    else:
        member.all_reduce(array, ReduceOp.SUM)


@pytest.mark.parametrize("bit", [20, 39])
@pytest.mark.parametrize(
    "kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST], ids=lambda k: k.name
)
def test_a_wrong_place_is_refused_and_its_rank_named(
    kind: Kind, bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "share_process", lambda _: None)  # use the core
    locate = Arena.locate

    def locate_wrong(self: Arena, buffer: Any) -> int:
        where = locate(self, buffer)
        return where ^ 1 << bit if where and self._rank == 1 else where

    monkeypatch.setattr(Arena, "locate", locate_wrong)

    def call_with(member: Member, array: Any) -> None:
        _make_call(member, kind, array)
        member.barrier()

    def body(member: Member) -> None:
        call = member.call(Kind.ALLOCATE, np.float64, COUNT)
        array = member.comm.allocate(call, COUNT, np.dtype(np.float64))
        array[:] = 1
        if member.rank == 1:
            with pytest.raises(PeerLostError):
                call_with(member, array)
        else:
            with pytest.raises(DistBackendError, match=r"rank 1 .* damaged"):
                call_with(member, array)
            member.comm.abort("damaged")

    run_group(SHM, 2, body)


def test_no_peer_can_change_the_size_of_a_segment() -> None:
    segment = OwnedSegment(1 << 14, "test")
    fd = os.dup(segment.fd)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert adopt(fd).nbytes == 1 << 14


def test_memory_that_could_be_cut_off_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 14)
    with pytest.raises(DistError, match="sealed"):
        adopt(fd)


def test_a_board_that_is_not_within_its_memory_is_refused() -> None:
    if core is None:
        pytest.skip("there is no compiled core")
    memory = bytearray(1 << 14)
    right: list[Any] = [[64, 128], [[256] * 4] * 2, [[4096] * 4] * 2, 0, 4096, False]
    core.Board(memory, 0, 2, *right)
    beyond: list[Any] = [[64, 1 << 14], [[256] * 4, [1 << 40] * 4], [[1 << 14] * 4] * 2]
    for place, wrong in enumerate([*beyond, 1 << 14, 1 << 14]):
        with pytest.raises(ValueError, match="not within"):
            core.Board(memory, 0, 2, *right[:place], wrong, *right[place + 1 :])
