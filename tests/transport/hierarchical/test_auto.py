"""The transport that chooses: what it chooses, and that messages come whatever way they take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from rank_threads import LONG, Member, Transport, run_group, run_threads

from transport import _auto as auto
from transport._auto import AutoCommunicator
from transport._call import Kind
from transport._choosing.choice import Thresholds
from transport._communicators.backends import lookup
from transport._communicators.runtime import Membership
from transport._errors import DistNetworkError
from transport._hierarchical import HierarchicalCommunicator
from transport._operands.reduce_op import ReduceOp
from transport._place import Place
from transport._shm import ShmCommunicator
from transport._shm.sizes import DEFAULT_SIZES


def on_hosts(placement: str) -> Transport:
    """Members on imaginary hosts: rank i is on the host called ``placement[i]``."""

    def make(membership: Membership, table: Thresholds) -> AutoCommunicator:
        host = Place(placement[membership.rank])
        return AutoCommunicator(membership, table, DEFAULT_SIZES, host)

    return Transport(f"auto-{placement}", make, has_links=False)


def chosen(member: Member) -> type:
    return type(member.comm._chosen)  # type: ignore[attr-defined]


def sums(member: Member) -> None:
    for count in (1, 300_000):
        array = np.full(count, member.rank, np.float32)
        member.all_reduce(array, ReduceOp.SUM)
        assert (array == sum(range(member.size))).all()


def test_the_registry_knows_it() -> None:
    assert lookup("AUTO").load() is AutoCommunicator


def test_members_on_one_host_share_memory() -> None:
    def body(member: Member) -> None:
        sums(member)
        assert chosen(member) is ShmCommunicator
        assert member.comm._far is None  # type: ignore[attr-defined]

    run_group(on_hosts("aaa"), 3, body)


@pytest.mark.parametrize("placement", ["ab", "abab", "aab"])
def test_members_on_several_hosts_use_both(placement: str) -> None:
    def body(member: Member) -> None:
        sums(member)
        assert chosen(member) is HierarchicalCommunicator

    run_group(on_hosts(placement), len(placement), body)


def test_symmetric_memory_is_there_whatever_is_chosen() -> None:
    for placement in ("aa", "ab"):

        def body(member: Member) -> None:
            call = member.call(Kind.ALLOCATE, np.float32, 100_000)
            array = member.comm.allocate(call, 100_000, np.dtype(np.float32))
            array[:] = member.rank
            member.all_reduce(array, ReduceOp.SUM)
            assert (array == 1).all()

        run_group(on_hosts(placement), 2, body)


def test_ranks_that_cannot_share_memory_use_tcp_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto, "unsupported_reason", lambda: "there is no engine here")

    def body(member: Member) -> None:
        sums(member)
        assert chosen(member) is HierarchicalCommunicator
        assert member.comm._near is None  # type: ignore[attr-defined]
        member.send(np.ones(3), (member.rank + 1) % 2)
        got = np.zeros(3)
        assert member.recv(got, None) == (member.rank + 1) % 2
        assert (got == 1).all()

    run_group(on_hosts("aa"), 2, body)
    # Each rank says so once; these are threads of one process, with a runtime each.
    assert caplog.text.count("there is no engine here") == 2


def test_where_no_descriptor_arrives_nobody_shares_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meet = ShmCommunicator.meet

    def refuse(self: ShmCommunicator, call: object) -> None:
        if self.rank == 1:
            raise DistNetworkError("no descriptor came")
        meet(self, call)  # type: ignore[arg-type]

    monkeypatch.setattr(ShmCommunicator, "meet", refuse)

    def body(member: Member) -> None:
        sums(member)
        assert chosen(member) is HierarchicalCommunicator

    run_group(on_hosts("aaa"), 3, body)
    assert "no descriptor came" in caplog.text


@pytest.mark.parametrize("placement", ["aaa", "aab", "abc"])
def test_any_source_hears_those_near_and_those_far(placement: str) -> None:
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

    run_group(on_hosts(placement), 3, body)


def test_a_message_from_afar_wakes_who_waits_for_neighbours_too() -> None:
    """Both kinds of waiting end at once, though one thread waits in both places."""

    def body(member: Member) -> None:
        if member.rank == 0:
            started = time.monotonic()
            got = np.zeros(1)
            jobs: list[Callable[[], int]] = [
                lambda: member.recv(np.zeros(1), 1),
                lambda: member.recv(got, 2),
            ]
            run_threads(jobs)
            assert time.monotonic() - started < LONG / 2
        else:
            time.sleep(0.1 * member.rank)
            member.send(np.ones(1), 0)

    for placement in ("aab", "aba"):
        run_group(on_hosts(placement), 3, body)


def test_two_members_can_talk_before_a_third_has_come() -> None:
    talked = threading.Event()

    def make(membership: Membership, table: Thresholds) -> AutoCommunicator:
        if membership.rank == 2:
            assert talked.wait(LONG)
        return AutoCommunicator(membership, table)

    def body(member: Member) -> None:
        if member.rank == 0:
            member.send(np.ones(5), 1)
        elif member.rank == 1:
            assert member.recv(np.zeros(5), None) == 0
            talked.set()
        member.barrier()
        assert chosen(member) is ShmCommunicator

    run_group(Transport("auto", make, has_links=False), 3, body)
