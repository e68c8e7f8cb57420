"""The hierarchical transport: what crosses the network, and who is told what.

Hosts are pretended: ranks are threads, and a rank is told on which host it is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.transport.counting import Count, counting
from tests.support.transport.growing import with_growing_deadlines
from tests.support.transport.pretended import Across, pretended
from tests.support.transport.rank_threads import LONG, TINY, Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport._hierarchical import HierarchicalCommunicator
from transport._inproc.communicator import InprocCommunicator
from transport._operands.flat import part_bounds
from transport._operands.reduce_op import Flat, ReduceOp, premul_sum

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
PLACEMENTS = ["aab", "aabb", "abab", "aaabc", "abcab", "aabbcc", "bacbab"]
"""By rank, the hosts: contiguous or not, equally full or not."""


def on_hosts(hosts: str, across: Across = InprocCommunicator) -> Transport:
    return pretended(hosts, across)


def crossing(hosts: str, body: Callable[[Member], Any], table: Thresholds) -> Count:
    """Run ``body`` on every rank; return what they sent from one host to another."""
    network, local = Count(), Count()
    across = counting(lambda rank, peer: local if hosts[rank] == hosts[peer] else network)
    run_group(on_hosts(hosts, across), len(hosts), body, table)
    assert local.bytes == 0  # shared memory is for that
    return network


# ---------------------------------------------------------------- bytes on the network

LARGE = 1003
TABLE = replace(TINY, segment=256)


def others(hosts: str) -> int:
    return len(set(hosts)) - 1


def sums_of(hosts: str) -> Counter[str]:
    """How many sums each host has: one for each largest subtree whose ranks it has."""
    found = Counter[str]()

    def count(first: int, width: int) -> None:
        there = set(hosts[first : first + width])
        if len(there) == 1:
            found.update(there)
        elif there:
            count(first, width // 2)
            count(first + width // 2, width // 2)

    count(0, 1 << (len(hosts) - 1).bit_length())
    return found


def is_one_tree(hosts: str) -> bool:
    return hosts in ("aab", "aabb", "aabbcc")


def sent_to_owners(hosts: str, slices: int, elements: int = 1003) -> int:
    """How many elements cross until each host has the sums of what it reduces of each slice."""
    names = list(dict.fromkeys(hosts))
    total = 0
    for number in range(slices):
        start, stop = part_bounds(elements, slices, number)
        for host, name in enumerate(names):
            begin, end = part_bounds(stop - start, len(names), host)
            others_sums = sum(sums_of(hosts).values()) - sums_of(hosts)[name]
            total += (end - begin) * (others_sums if not is_one_tree(hosts) else len(names) - 1)
    return total


@pytest.mark.parametrize("hosts", PLACEMENTS)
@pytest.mark.parametrize("one_slice", [0, 1 << 20], ids=["slices", "one slice"])
@pytest.mark.parametrize("root", [0, 2])
def test_a_broadcast_and_a_reduce_cross_once_a_host(hosts: str, one_slice: int, root: int) -> None:
    def broadcast(member: Member) -> None:
        call = member.call(Kind.BROADCAST, F32, LARGE, root=root)
        member.comm.broadcast(call, np.ones(LARGE, F32), root)

    def reduce(dtype: np.dtype[Any], op: ReduceOp) -> Callable[[Member], None]:
        def body(member: Member) -> None:
            call = member.call(Kind.REDUCE, dtype, LARGE, op, root)
            member.comm.reduce(call, np.ones(LARGE, dtype), op, root)

        return body

    table = replace(TABLE, one_slice=one_slice)
    least = others(hosts) * LARGE * 4
    assert crossing(hosts, broadcast, table).bytes == least
    if not is_one_tree(hosts):
        least = (sum(sums_of(hosts).values()) - sums_of(hosts)[hosts[root]]) * LARGE * 4
    assert crossing(hosts, reduce(F32, ReduceOp.SUM), table).bytes == least
    assert crossing(hosts, reduce(F32, premul_sum(2.0)), table).bytes == least
    assert crossing(hosts, reduce(BF16, ReduceOp.SUM), table).bytes == least


@pytest.mark.parametrize("hosts", PLACEMENTS)
@pytest.mark.parametrize("one_slice", [0, 1 << 20], ids=["slices", "one slice"])
def test_an_all_reduce_crosses_as_one_between_hosts(hosts: str, one_slice: int) -> None:
    def crossed(dtype: np.dtype[Any], op: ReduceOp) -> int:
        def body(member: Member) -> None:
            member.all_reduce(np.ones(LARGE, dtype), op)

        return crossing(hosts, body, replace(TABLE, one_slice=one_slice)).bytes

    slices = 1 if one_slice else min(Counter(hosts).values())
    there, back = sent_to_owners(hosts, slices), others(hosts) * LARGE
    assert crossed(F32, ReduceOp.AVG) == 4 * (there + back)
    assert crossed(F32, premul_sum(2.0)) == 4 * (there + back)
    # Partial sums are wide, results are not.
    assert crossed(BF16, ReduceOp.SUM) == 4 * there + 2 * back


@pytest.mark.parametrize("hosts", PLACEMENTS)
@pytest.mark.parametrize("one_slice", [0, 1 << 20], ids=["slices", "one slice"])
def test_an_all_gather_and_a_reduce_scatter_cross_once_a_host(hosts: str, one_slice: int) -> None:
    sizes = [100 + 37 * (rank % 4) for rank in range(len(hosts))]

    def gather(member: Member) -> None:
        outputs = [np.zeros(size, F32) for size in sizes]
        own = np.ones(sizes[member.rank], F32)
        member.comm.all_gather(member.call(Kind.ALL_GATHER, F32), outputs, own)

    def scatter(member: Member) -> None:
        inputs = [np.ones(size, F32) for size in sizes]
        output = np.zeros(sizes[member.rank], F32)
        call = member.call(Kind.REDUCE_SCATTER, F32, op=ReduceOp.SUM)
        member.comm.reduce_scatter(call, output, inputs, ReduceOp.SUM)

    table = replace(TABLE, one_slice=one_slice, reduce_scatter_doubling=0)
    least = others(hosts) * sum(sizes) * 4
    assert crossing(hosts, gather, table).bytes == least
    if not is_one_tree(hosts):
        of_host = Counter[str]()
        for host, size in zip(hosts, sizes, strict=True):
            of_host[host] += size
        found = sums_of(hosts)
        least = sum(4 * size * (found.total() - found[host]) for host, size in of_host.items())
    assert crossing(hosts, scatter, table).bytes == least


@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_what_differs_for_every_member_crosses_once(hosts: str) -> None:
    n, root = len(hosts), 1
    sizes = [11 * (rank + 1) for rank in range(n)]
    elsewhere = [rank for rank in range(n) if hosts[rank] != hosts[root]]

    def gather(member: Member) -> None:
        outputs = [np.zeros(size, F32) for size in sizes] if member.rank == root else None
        own = np.ones(sizes[member.rank], F32)
        member.comm.gather(member.call(Kind.GATHER, F32, root=root), outputs, own, root)

    def scatter(member: Member) -> None:
        inputs = [np.ones(size, F32) for size in sizes] if member.rank == root else None
        output = np.zeros(sizes[member.rank], F32)
        member.comm.scatter(member.call(Kind.SCATTER, F32, root=root), output, inputs, root)

    def all_to_all(member: Member) -> None:
        inputs = [np.ones(sizes[member.rank], F32) for _ in range(n)]
        outputs = [np.zeros(size, F32) for size in sizes]
        member.comm.all_to_all(member.call(Kind.ALL_TO_ALL, F32), outputs, inputs)

    once = Count(len(elsewhere), 4 * sum(sizes[rank] for rank in elsewhere))
    assert crossing(hosts, gather, TABLE) == once
    assert crossing(hosts, scatter, TABLE) == once
    pairs = [(i, j) for i in range(n) for j in range(n) if hosts[i] != hosts[j]]
    total = Count(len(pairs), 4 * sum(sizes[i] for i, _ in pairs))
    assert crossing(hosts, all_to_all, TABLE) == total


@pytest.mark.parametrize(("hosts", "frames"), [("aab", 2), ("abab", 2), ("aabbcc", 4)])
def test_a_barrier_crosses_without_data(hosts: str, frames: int) -> None:
    assert crossing(hosts, lambda member: member.barrier(), TABLE) == Count(frames, 0)


def test_slices_cross_between_as_many_members_as_the_smallest_host_has() -> None:
    hosts, senders = "aaabb", set[int]()

    def count_of(rank: int, peer: int) -> Count:
        if hosts[rank] != hosts[peer]:
            senders.add(rank)
        return Count()

    def body(member: Member) -> None:
        member.all_reduce(np.ones(LARGE, F32), ReduceOp.SUM)

    for one_slice, expected in ((0, {0, 1, 3, 4}), (1 << 20, {0, 3})):
        senders.clear()
        table = replace(TABLE, one_slice=one_slice)
        run_group(on_hosts(hosts, counting(count_of)), len(hosts), body, table)
        assert senders == expected


# ---------------------------------------------------------------- bits and memory


@pytest.mark.parametrize("hosts", PLACEMENTS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_same_bits_everywhere_and_every_time(hosts: str, dtype: np.dtype[Any]) -> None:
    n = len(hosts)

    def body(member: Member) -> list[bytes]:
        values = np.random.default_rng(member.rank).normal(size=LARGE).astype(dtype)
        total, part = values.copy(), np.zeros(40, dtype)
        member.all_reduce(total, ReduceOp.AVG)
        call = member.call(Kind.REDUCE_SCATTER, dtype, op=ReduceOp.SUM)
        member.comm.reduce_scatter(call, part, [values[i : i + 40] for i in range(n)], ReduceOp.SUM)
        call = member.call(Kind.REDUCE, dtype, LARGE, ReduceOp.SUM, 1)
        member.comm.reduce(call, values, ReduceOp.SUM, 1)
        return [total.tobytes(), part.tobytes(), values.tobytes()]

    first, second = (run_group(on_hosts(hosts), n, body, TABLE) for _ in range(2))
    assert first == second
    assert len({total for total, _, _ in first}) == 1


def test_narrow_floats_are_rounded_once() -> None:
    """In bfloat16, 256 and one is 256; in float32 the ones of a host would not be lost either."""

    def body(member: Member) -> list[Flat]:
        one = np.full(LARGE, 256 if member.rank == 0 else 1, BF16)
        total, part = one.copy(), np.zeros(LARGE, BF16)
        member.all_reduce(total, ReduceOp.SUM)
        call = member.call(Kind.REDUCE_SCATTER, BF16, op=ReduceOp.SUM)
        member.comm.reduce_scatter(call, part, [one] * 4, ReduceOp.SUM)
        call = member.call(Kind.REDUCE, BF16, LARGE, ReduceOp.SUM, 2)
        member.comm.reduce(call, one, ReduceOp.SUM, 2)
        return [total, part, one] if member.rank == 2 else [total, part]

    for one_slice in (0, 1 << 20):
        table = replace(TABLE, one_slice=one_slice)
        for results in run_group(on_hosts("aabb"), 4, body, table):
            assert all((result == 260).all() for result in results)  # 259, rounded to even


def test_scratch_memory_is_bounded() -> None:
    size = 1_000_003
    held: list[int] = []

    def body(member: Member) -> None:
        for dtype in (F32, BF16):
            member.all_reduce(np.ones(size, dtype), ReduceOp.SUM)
            call = member.call(Kind.REDUCE, dtype, size, ReduceOp.SUM, 0)
            member.comm.reduce(call, np.ones(size, dtype), ReduceOp.SUM, 0)
            parts = [np.ones(size // 3, dtype) for _ in range(3)]
            call = member.call(Kind.REDUCE_SCATTER, dtype, op=ReduceOp.SUM)
            member.comm.reduce_scatter(call, np.zeros(size // 3, dtype), parts, ReduceOp.SUM)
            call = member.call(Kind.ALL_GATHER, dtype)
            member.comm.all_gather(call, parts, np.ones(size // 3, dtype))
        assert isinstance(member.comm, HierarchicalCommunicator)
        held.append(member.comm.scratch.nbytes)

    run_group(on_hosts("aab"), 3, body, replace(TABLE, segment=4096))
    assert 0 < max(held) <= 5 * 2 * 16 * 4096  # five pieces, of a power of two each


@pytest.mark.parametrize("hosts", ["aab", "abab", "aa", "ab"])
def test_allocated_memory_is_reduced_like_any_other(hosts: str) -> None:
    def body(member: Member) -> None:
        call = member.call(Kind.ALLOCATE, F32, LARGE)
        memory = member.comm.allocate(call, LARGE, F32)
        assert (memory.size, memory.dtype) == (LARGE, F32)
        for turn in range(3):
            memory[:] = member.rank + turn
            member.all_reduce(memory, ReduceOp.SUM)
            assert (memory == sum(range(len(hosts))) + turn * len(hosts)).all()

    run_group(on_hosts(hosts), len(hosts), body, TABLE)


# ---------------------------------------------------------------- trouble


def test_errors_inside_a_host_name_ranks_of_the_whole_group() -> None:
    """Ranks 1 and 3 are on one host; there, rank 3 is number 1."""
    ranks = (5, 6, 7, 8)

    def body(member: Member) -> None:
        member.barrier()
        if member.rank == 3:
            member.comm.close()
        elif member.rank == 1:
            call = member.call(Kind.BARRIER)
            with pytest.raises(PeerLostError, match=r"rank 8 \(rank 3 of the group\)") as lost:
                member.comm.barrier(call)
            assert lost.value.peer == 3

    run_group(on_hosts("abab"), 4, body, TABLE, global_ranks=ranks)


@pytest.mark.parametrize("peer", [1, 2], ids=["on another host", "on the same"])
def test_deadlines_and_waits_name_ranks_of_the_whole_group(peer: int) -> None:

    def body(member: Member) -> None:
        member.barrier()
        if member.rank == 0:
            call = member.call(Kind.GATHER, F32, root=0, timeout=seconds)
            outputs = [np.zeros(3, F32) for _ in range(4)]
            seen = set[int | None]()
            late: list[CommunicatorTimeoutError] = []

            def gather() -> None:
                with pytest.raises(CommunicatorTimeoutError) as raised:
                    member.comm.gather(call, outputs, outputs[0].copy(), 0)
                late.append(raised.value)

            thread = threading.Thread(target=gather)
            thread.start()
            while thread.is_alive():
                seen.add(call.waiting_for)
                time.sleep(0.01)
            thread.join(LONG)
            found.append((late[0], seen))
        elif hosts[member.rank] == hosts[0] and peer == 1:
            call = member.call(Kind.GATHER, F32, root=0)
            member.comm.gather(call, None, np.ones(3, F32), 0)
        gate.wait()

    hosts, seconds = "abab", 0.0
    found: list[tuple[CommunicatorTimeoutError, set[int | None]]] = []
    gate = threading.Barrier(4, timeout=LONG)

    def attempt(given: float) -> tuple[CommunicatorTimeoutError, set[int | None]] | None:
        nonlocal seconds
        seconds = given
        run_group(on_hosts(hosts), 4, body, TABLE)
        late, seen = found.pop()
        return (late, seen) if late.peer == peer and peer in seen else None

    late, seen = with_growing_deadlines(attempt)
    assert f"rank {peer}" in str(late)
    assert seen <= {None, peer, 2}


@pytest.mark.parametrize("hosts", ["aab", "aabb", "abab", "aaabc"])
def test_members_of_one_host_that_disagree_raise(hosts: str) -> None:
    """They wait for each other on different levels, and yet are told before the deadline."""
    near, last = hosts.index(hosts[0], 1), len(hosts) - 1
    started = threading.Barrier(len(hosts), timeout=LONG)

    def body(member: Member) -> bool:
        member.barrier()
        started.wait()
        buffer = np.ones(LARGE, F32)
        try:
            if member.rank == near:
                call = member.call(Kind.SCATTER, F32, root=last)
                member.comm.scatter(call, buffer, None, last)
            else:
                member.all_reduce(buffer, ReduceOp.SUM)
        except (HeaderMismatchError, PeerLostError, CommunicatorAbortedError) as error:
            member.comm.abort("members disagree")
            differs = isinstance(error, HeaderMismatchError)
            return differs and hosts[error.peer] == hosts[member.rank]
        return False

    named = run_group(on_hosts(hosts), len(hosts), body, TABLE)
    assert any(named)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaabc"])
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("in_order", [True, False], ids=["closes", "aborts"])
def test_one_failure_ends_the_call_on_all_levels(hosts: str, victim: int, in_order: bool) -> None:
    """A member is missed, whatever level the others wait on, once those who notice abort."""
    n = len(hosts)
    started = threading.Barrier(n, timeout=LONG)

    def body(member: Member) -> None:
        member.all_reduce(np.ones(LARGE, F32), ReduceOp.SUM)
        started.wait()
        if member.rank == victim:
            time.sleep(0.1)
            if in_order:
                member.comm.close()
            else:
                member.comm.abort("it is the victim")
            return

        def reduce_until_it_fails() -> None:
            while True:  # the first may be done without the victim's last word
                member.all_reduce(np.ones(LARGE, F32), ReduceOp.SUM)

        with pytest.raises((PeerLostError, CommunicatorAbortedError)) as error:
            reduce_until_it_fails()
        if isinstance(error.value, PeerLostError):
            assert error.value.peer in set(range(n)) - {member.rank}
        member.comm.abort("a member is gone")
        with pytest.raises(CommunicatorAbortedError, match="a member is gone"):
            member.barrier()

    run_group(on_hosts(hosts), n, body, TABLE)


def test_a_missing_member_is_named() -> None:
    """Before anybody knows who is on which host."""
    gate, there = threading.Barrier(2, timeout=LONG), threading.Event()

    def make(membership: Membership, table: Thresholds) -> Communicator:
        if membership.rank == 1:
            gate.wait()
        made = on_hosts("aab").make(membership, table)
        if membership.rank == 2:
            there.set()
        return made

    def body(member: Member) -> None:
        if member.rank == 0:
            assert there.wait(LONG)
            call = member.call(Kind.BARRIER, timeout=0.4)
            with pytest.raises(CommunicatorTimeoutError, match=r"rank 1 has not entered") as late:
                member.comm.barrier(call)
            assert late.value.peer == 1
            assert call.waiting_for == 1
            gate.wait()

    run_group(Transport("late", make), 3, body, TABLE)


def test_an_abort_ends_the_wait_for_missing_members() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def make(membership: Membership, table: Thresholds) -> Communicator:
        if membership.rank == 1:
            gate.wait()
        return on_hosts("ab").make(membership, table)

    def body(member: Member) -> None:
        if member.rank == 1:
            return
        aborter = threading.Timer(0.3, member.comm.abort, ["enough of this"])
        aborter.start()
        with pytest.raises(CommunicatorAbortedError, match="enough of this"):
            member.barrier()
        aborter.join(LONG)
        gate.wait()

    run_group(Transport("late", make), 2, body, TABLE)
