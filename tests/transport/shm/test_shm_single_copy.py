"""Large private arrays, and symmetric ones, are read where they lie; where that is not allowed,
they are staged."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from rank_threads import LONG, Member, Transport, run_group
from test_shm_symmetric import allocate, untouched

from transport.call import Kind
from transport.communicators.runtime import Membership, Runtime
from transport.errors import CommunicatorTimeoutError, PeerLostError
from transport.operands.copying import copy, copy_bytes
from transport.operands.reduce_op import Flat, ReduceOp
from transport.shm import ShmCommunicator
from transport.shm.board.layout import Sizes
from transport.shm.messages import single_copy
from transport.shm.messages.single_copy import PeerMemory, ProcessMemory
from transport.store.hash_store import HashStore

SIZES = Sizes(block=1 << 10, direct=64, ring=1 << 11, piece=256, single=1 << 13)
N = 3
COUNT = 5003


def make(membership: Membership, _table: object) -> ShmCommunicator:
    return ShmCommunicator(membership, SIZES)


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cores there are."""
    monkeypatch.setattr(single_copy, "_WORTH_A_THREAD", SIZES.single)


SHM = Transport("shm", make, has_links=False)


def private(member: Member, count: int) -> Flat:
    return np.zeros(count, np.int32)


def symmetric(member: Member, count: int) -> Flat:
    return allocate(member, count, np.int32)


def copy_everything(member: Member, new: object) -> None:
    """Every call that only copies, large, with results that are known."""
    assert callable(new)
    rank, comm = member.rank, member.comm
    counts = [COUNT + peer for peer in range(N)]

    def call(kind: Kind, root: int = -1) -> object:
        return member.call(kind, np.dtype(np.int32), root=root)

    def fresh(sizes: Sequence[int]) -> list[Flat]:
        return [np.zeros(size, np.int32) for size in sizes]

    buffer = new(member, COUNT)
    for root in (0, 2):
        buffer[:] = np.arange(COUNT) + rank
        comm.broadcast(member.call(Kind.BROADCAST, buffer.dtype, COUNT, root=root), buffer, root)
        assert np.array_equal(buffer, np.arange(COUNT) + root)
    own = new(member, COUNT + N)[: counts[rank]]
    own[:] = np.arange(own.size) * 10 + rank
    outputs = fresh(counts)
    comm.all_gather(call(Kind.ALL_GATHER), outputs, own)
    for peer, output in enumerate(outputs):
        assert np.array_equal(output, np.arange(output.size) * 10 + peer)
    outputs = fresh(counts)
    comm.gather(call(Kind.GATHER, 1), outputs if rank == 1 else None, own, 1)
    for peer, output in enumerate(outputs if rank == 1 else ()):
        assert np.array_equal(output, np.arange(output.size) * 10 + peer)
    whole = new(member, sum(counts))
    inputs = np.split(whole, np.cumsum(counts)[:-1])
    for peer, part in enumerate(inputs):
        part[:] = np.arange(part.size) + 100 * rank + peer
    output = np.zeros(counts[rank], np.int32)
    comm.scatter(call(Kind.SCATTER, 2), output, inputs if rank == 2 else None, 2)
    assert np.array_equal(output, np.arange(output.size) + 200 + rank)
    outputs = fresh([counts[rank]] * N)
    comm.all_to_all(call(Kind.ALL_TO_ALL), outputs, inputs)
    for peer, output in enumerate(outputs):
        assert np.array_equal(output, np.arange(output.size) + 100 * peer + rank)


@pytest.mark.parametrize("new", [private, symmetric])
def test_what_is_large_is_copied_once_and_nothing_is_staged(new: object) -> None:
    def body(member: Member) -> None:
        member.barrier()
        if new is symmetric:
            allocate(member, 1)
        before = untouched(member)
        copy_everything(member, new)
        assert untouched(member)[1:] == before[1:] or new is symmetric  # allocation votes
        assert member.comm._meeting.places.memory is not None  # type: ignore[attr-defined]

    run_group(SHM, N, body)


def test_reduce_reads_symmetric_arrays_in_place() -> None:
    def body(member: Member) -> None:
        array = allocate(member, COUNT, np.float32, member.rank)
        before = untouched(member)
        call = member.call(Kind.REDUCE, array.dtype, COUNT, root=1)
        member.comm.reduce(call, array, ReduceOp.SUM, 1)
        assert (array == (3 if member.rank == 1 else member.rank)).all()
        assert untouched(member) == before

    run_group(SHM, N, body)


def refuse_in_rank_1() -> bool:
    return threading.current_thread().name != "rank-1"


def refuse(self: PeerMemory, peer: int, where: int, into: Flat, **_: bool) -> None:
    raise PeerLostError("not permitted", peer)


@pytest.mark.parametrize("why", ["one does not try", "the kernel refuses", "another process"])
def test_where_one_cannot_read_all_stage(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "one does not try":
        monkeypatch.setattr(single_copy, "is_possible", refuse_in_rank_1)
    elif why == "the kernel refuses":
        monkeypatch.setattr(PeerMemory, "read", refuse)
    else:
        monkeypatch.setattr(single_copy, "_own_pid", lambda: 1)

    def body(member: Member) -> None:
        copy_everything(member, private)
        assert member.comm._meeting.places.memory is None  # type: ignore[attr-defined]
        assert member.comm.mailbox.memory is None  # type: ignore[attr-defined]

    run_group(SHM, N, body)


def test_a_large_message_is_taken_from_its_sender() -> None:
    def body(member: Member) -> None:
        member.barrier()
        message = np.arange(COUNT, dtype=np.int64) + member.rank
        small = np.zeros(4, np.int64)
        if member.rank == 0:
            for dst in (1, 2):
                member.send(small, dst)
                member.send(message, dst)
                member.send(small, dst)
        else:
            got = np.zeros_like(message)
            for buffer in (small, got, small):
                member.recv(buffer, 0)
            assert np.array_equal(got, np.arange(COUNT))
            ring = member.comm.mailbox._rings[0]  # type: ignore[attr-defined]
            assert ring.position == 64 * 5  # five lines, and none of the large message's bytes

    run_group(SHM, N, body)


def test_who_gives_up_sending_is_not_read_any_more() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        member.barrier()
        small, message = np.ones(1, np.uint8), np.ones(9 << 20, np.uint8)
        if member.rank == 0:
            member.send(small, 1)  # with it, the other is more than is taken in for nobody
            with pytest.raises(CommunicatorTimeoutError):
                member.send(message, 1, timeout=0.2)
            gate.wait()
            gate.wait()
        else:
            gate.wait()
            member.recv(small, 0)
            with pytest.raises(PeerLostError, match="rank 0 broke off"):
                member.recv(message, 0)
            gate.wait()

    run_group(SHM, 2, body)


def test_a_core_to_spare_reads_a_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(N))
    before = set(threading.enumerate())

    def body(member: Member) -> None:
        copy_everything(member, private)
        message = np.arange(COUNT) if member.rank == 0 else np.zeros(COUNT, np.int64)
        if member.rank == 0:
            member.send(message, 1)
        elif member.rank == 1:
            member.recv(message, 0)
            assert np.array_equal(message, np.arange(COUNT))

    run_group(SHM, N, body)
    assert "meshlib-shm-read" not in {t.name for t in set(threading.enumerate()) - before}


def test_a_helper_that_cannot_read_says_whose_memory() -> None:
    membership = Membership("group", 0, (0, 1), HashStore(), Runtime(None))
    memory = PeerMemory(membership, {1: os.getpid()}, 0)
    memory._cores_to_spare = True
    size = 16 << 20
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    source = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    into = np.ones(size, np.uint8)
    memory.read(1, source.ctypes.data, into, alone=True)
    assert not into.any()
    os.ftruncate(fd, size * 3 // 4)  # what is in the second half is gone
    os.close(fd)
    with pytest.raises(PeerLostError, match="the memory of rank 1 cannot be read") as lost:
        memory.read(1, source.ctypes.data, into, alone=True)
    assert lost.value.peer == 1


@pytest.mark.parametrize("shift", [0, 1, 16, 32])
def test_where_the_kernel_would_be_slow_it_copies_to_a_better_place(
    monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    monkeypatch.setattr(single_copy, "_BOUNCED", 1 << 13)
    memory = ProcessMemory(os.getpid())
    copied: list[int] = []
    plain = memory._copy

    def counted(where: int, start: int, nbytes: int) -> None:
        copied.append((start - where) % mmap.PAGESIZE)
        plain(where, start, nbytes)

    monkeypatch.setattr(memory, "_copy", counted)
    source = np.arange(3 * (1 << 13) + 5, dtype=np.uint16).view(np.uint8)[1:]
    room = np.zeros(source.size + 2 * mmap.PAGESIZE, np.uint8)
    first = (source.ctypes.data + shift - room.ctypes.data) % mmap.PAGESIZE
    into = room[first : first + source.size]
    memory.read(source.ctypes.data, into)
    assert np.array_equal(into, source)
    assert not room[:first].any()
    assert not room[first + source.size :].any()
    assert all(offset == 0 or offset >= 32 for offset in copied)
    assert (len(copied) > 1) == (0 < shift < 32)


@pytest.mark.parametrize("shift", [0, 16, 1000])
@pytest.mark.parametrize("count", [3, 5000, 1 << 18])
def test_copies_are_exact_wherever_they_begin(count: int, shift: int) -> None:
    memory = np.empty(8 * count + 8192, np.uint8)
    source, into = memory[: 4 * count].view(np.float32), memory[-4 * count - shift :]
    source[:] = np.arange(count)
    source[0] = np.nan
    into = into[: 4 * count]
    for way in (
        lambda: copy(into, source.view(np.uint8)),
        lambda: copy_bytes(into.data, source.view(np.uint8).data),
    ):
        into[:] = 0
        way()
        assert into.tobytes() == source.tobytes()
