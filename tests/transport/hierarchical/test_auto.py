"""The transport that chooses: what it chooses, and that messages come whatever way they take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.transport.pretended import pretended
from tests.support.transport.rank_threads import LONG, Member, Transport, run_group, run_threads
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._communicators.backends import lookup
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._hierarchical import HierarchicalCommunicator
from transport._hierarchical.auto import choose
from transport._operands.reduce_op import ReduceOp
from transport._place import Place
from transport._shm import ShmCommunicator
from transport._tcp import TcpCommunicator


def sums(member: Member) -> None:
    for count in (1, 300_000):
        array = np.full(count, member.rank, np.float32)
        member.all_reduce(array, ReduceOp.SUM)
        assert (array == sum(range(member.size))).all()


def test_the_registry_knows_it() -> None:
    assert lookup("AUTO").load() is choose


def test_members_on_one_host_share_memory() -> None:
    def body(member: Member) -> None:
        sums(member)
        assert type(member.comm) is ShmCommunicator

    run_group(pretended("aaa"), 3, body)


@pytest.mark.parametrize(
    ("placement", "chosen"),
    [
        ("ab", TcpCommunicator),
        ("abab", HierarchicalCommunicator),
        ("aab", HierarchicalCommunicator),
    ],
)
def test_members_on_several_hosts_use_both(placement: str, chosen: type) -> None:
    def body(member: Member) -> None:
        sums(member)
        assert type(member.comm) is chosen

    run_group(pretended(placement), len(placement), body)


def test_symmetric_memory_is_there_whatever_is_chosen() -> None:
    for placement in ("aa", "ab"):

        def body(member: Member) -> None:
            call = member.call(Kind.ALLOCATE, np.float32, 100_000)
            array = member.comm.allocate(call, 100_000, np.dtype(np.float32))
            array[:] = member.rank
            member.all_reduce(array, ReduceOp.SUM)
            assert (array == 1).all()

        run_group(pretended(placement), 2, body)


def test_ranks_that_cannot_share_memory_use_tcp_and_log_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(member: Member) -> None:
        sums(member)
        assert type(member.comm) is TcpCommunicator
        member.send(np.ones(3), (member.rank + 1) % 2)
        got = np.zeros(3)
        assert member.recv(got, None) == (member.rank + 1) % 2
        assert (got == 1).all()

    run_group(pretended([Place("a", "there is no engine here")] * 2), 2, body)
    # Each rank says so once; these are threads of one process, with a runtime each.
    assert caplog.text.count("there is no engine here") == 2


@pytest.mark.parametrize("placement", ["aaa", "baa", "abc"])
def test_everybody_can_talk_to_everybody_and_to_itself(placement: str) -> None:
    def body(member: Member) -> None:
        for peer in range(3):
            member.send(np.full(5, member.rank), peer)
        for peer in (*range(3), None):
            if peer is None:
                member.send(np.full(5, member.rank), member.rank)
            got = np.zeros(5, np.int64)
            src = member.recv(got, peer)
            assert src == (member.rank if peer is None else peer)
            assert (got == src).all()

    run_group(pretended(placement), 3, body)


@pytest.mark.parametrize("placement", ["aaa", "aab", "abc"])
def test_any_source_receives_from_near_and_far(placement: str) -> None:
    count = 20

    def body(member: Member) -> None:
        if member.rank:
            for i in range(count):
                member.send(np.full(1 + 40_000 * (i % 2), i, np.int32), 0, tag=i % 2)
            return
        for tag in (1, 0):  # of each source in order, of all in any
            last = {1: tag - 2, 2: tag - 2}
            for _ in range(count):
                got = np.empty(1 + 40_000 * tag, np.int32)
                src = member.recv(got, None, tag=tag)
                last[src] += 2
                assert (got == last[src]).all()

    run_group(pretended(placement), 3, body)


def test_a_message_from_afar_wakes_who_waits_for_neighbours_too() -> None:
    """Both kinds of waiting end at once, though one thread waits in both places."""

    def body(member: Member) -> None:
        if member.rank == 0:
            got = np.zeros(1)
            jobs: list[Callable[[], int]] = [
                lambda: member.recv(np.zeros(1), 1),
                lambda: member.recv(got, 2),
            ]
            run_threads(jobs)
        else:
            time.sleep(0.1 * member.rank)
            member.send(np.ones(1), 0)

    for placement in ("aab", "aba"):
        run_group(pretended(placement), 3, body)


def test_two_members_can_talk_before_a_third_has_arrived() -> None:
    talked = threading.Event()

    def make(membership: Membership, table: Thresholds) -> Communicator:
        if membership.rank == 2:
            assert talked.wait(LONG)
        return choose(membership, table)

    def body(member: Member) -> None:
        if member.rank == 0:
            member.send(np.ones(5), 1)
        elif member.rank == 1:
            assert member.recv(np.zeros(5), None) == 0
            talked.set()
        member.barrier()
        assert type(member.comm) is ShmCommunicator

    run_group(Transport("auto", make, has_links=False), 3, body)
