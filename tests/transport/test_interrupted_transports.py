"""Ctrl-C in the middle of a transport's call: what other threads wait for does not stay taken."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.net.tcp_pairs import links
from tests.support.transport.interrupts import SOON, at_every_step, at_random, in_thread
from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._choosing.choice import DEFAULT
from transport._communicators.runtime import Membership, Runtime
from transport._cuda import watchdog as watchdogs
from transport._cuda.watchdog import DeviceWatchdog
from transport._errors import CommunicatorAbortedError, CommunicatorTimeoutError
from transport._links import incoming, mailbox
from transport._links.mailbox import Mailbox
from transport._mpi import inbox as mpi_inbox
from transport._mpi.inbox import MpiInbox
from transport._nccl import call_comparer as comparers
from transport._nccl.call_comparer import CallComparer
from transport._shm import ShmCommunicator, messages
from transport._shm.sizes import Sizes
from transport._store.hash_store import HashStore
from transport._tcp import TcpCommunicator, connection, link, worker
from transport._tcp import communicator as tcp
from transport._tcp.link import TcpLink
from transport._waiting import interrupts
from transport._waiting.deadline import Deadline

SHM = Transport(
    "shm", lambda membership, _: ShmCommunicator(membership, Sizes(ring=1 << 10)), has_links=False
)
_CODE = {
    module.__file__
    for module in (
        interrupts,
        connection,
        incoming,
        comparers,
        link,
        mailbox,
        messages,
        mpi_inbox,
        tcp,
        watchdogs,
        worker,
    )
}


@contextmanager
def beside_a_peer(peer: Callable[[Member], object]) -> Generator[Member]:
    """Yield rank 0 of a group, for the main thread; ``peer(member)`` runs as rank 1."""
    members: queue.Queue[Member] = queue.Queue()
    done = threading.Event()

    def body(member: Member) -> None:
        if member.rank == 1:
            peer(member)
        else:
            members.put(member)
            assert done.wait(12 * SOON)

    group = in_thread(lambda: run_group(SHM, 2, body, seconds=12 * SOON))
    try:
        yield members.get(timeout=SOON)
    finally:
        done.set()
        group.result(SOON)


def test_receiving_in_vain_over_shm() -> None:
    """Messages go both ways after each interrupt."""
    orders: queue.Queue[bool] = queue.Queue()

    def peer(member: Member) -> None:
        x = np.arange(3.0)
        while orders.get(timeout=6 * SOON):
            member.send(x, 0, tag=9)
            member.recv(x, 0, tag=8)

    with beside_a_peer(peer) as member:

        def wait() -> None:
            with suppress(CommunicatorTimeoutError):
                member.recv(np.zeros(3), 1, timeout=0.0)

        def check() -> None:
            orders.put(True)
            got = np.zeros(3)
            member.recv(got, 1, tag=9, timeout=SOON)
            assert got.tolist() == [0.0, 1.0, 2.0]
            member.send(got, 1, tag=8, timeout=SOON)

        def long_wait() -> None:
            member.recv(np.zeros(3), 1, timeout=6 * SOON)

        try:
            assert at_every_step(wait, check, _CODE, stride=7) > 10
            at_random(long_wait, check, times=20)
        finally:
            orders.put(False)


def test_sending_over_shm() -> None:
    x, done = np.ones(1), threading.Event()

    def peer(member: Member) -> None:
        member.recv(x, 0, tag=8)
        done.wait(6 * SOON)

    with beside_a_peer(peer) as member:
        try:
            member.send(x, 1, tag=8)
            mailbox: Any = member.comm.mailbox  # type: ignore[attr-defined]
            turn = mailbox._writers[1].turn
            mailbox._write = lambda *_: None

            def check() -> None:
                assert turn.acquire(timeout=SOON)
                turn.release()

            assert at_every_step(lambda: member.send(x, 1, tag=7), check, _CODE) > 20
        finally:
            done.set()


def test_an_abort_ends_the_wait_for_an_interrupted_threads_connection() -> None:
    """An interrupted call has its communicator aborted."""
    with ExitStack() as stack:
        runtime = Runtime(secret=b"secret of the tests", host="127.0.0.1")
        stack.callback(runtime.close)
        membership = Membership("g", 0, (0, 1), HashStore(), runtime)
        comm: Any = TcpCommunicator(membership, DEFAULT)
        stack.callback(comm.close)
        # Where the interrupt came before the thread had said that it connects no more.
        comm._opening[1] = -1
        header = CallHeader(0, 1, NO_ROOT, Kind.SEND, dtype_code(np.dtype("f8")), 0)
        call = Call(header, Deadline.after(6 * SOON))
        sending = in_thread(lambda: comm.send(call, np.ones(1), 1, 0))
        while call.waiting_for != 1:
            time.sleep(0.001)
        comm.abort("interrupted")
        with pytest.raises(CommunicatorAbortedError, match="interrupted"):
            sending.result(SOON)


def test_a_frame_over_tcp() -> None:
    made, stack = list[tuple[TcpLink, TcpLink]](), ExitStack()

    def fresh() -> None:
        stack.close()
        made[:] = [stack.enter_context(links())]

    def send() -> None:
        header = CallHeader(1, 1, NO_ROOT, Kind.BROADCAST, dtype_code(np.dtype("f8")), 0)
        made[0][0].send(Call(header, Deadline.after(SOON)), np.ones(1).view(np.uint8).data)

    def check() -> None:
        send()
        made[0][0].close()
        assert made[0][0].first.fileno() < 0
        fresh()

    fresh()
    with stack:
        assert at_every_step(send, check, _CODE) > 30


def test_calls_on_a_device() -> None:
    watch = DeviceWatchdog("watch", lambda: None, lambda error: None)
    header = CallHeader(1, 1, NO_ROOT, Kind.BROADCAST, 0, 0)
    ended = SimpleNamespace(ended=lambda: True)

    def wait() -> None:
        watch.add(Call(header, Deadline.after(SOON)), cast("Any", ended))
        watch.drain(0.0001)

    wait()
    assert at_every_step(wait, lambda: watch.drain(0), _CODE) > 3
    watch.close()


def test_an_interrupt_ends_the_comparison_of_nccl_calls() -> None:
    ending = threading.Event()

    def all_gather(*_: object) -> None:
        ending.wait(12 * SOON)
        raise CommunicatorAbortedError("the test is over")  # what it gathers are not headers

    channel = SimpleNamespace(
        size=2,
        rank=0,
        all_gather=all_gather,
        abort=lambda reason: ending.set(),
        close=lambda: None,
    )
    comparer = CallComparer(cast("Any", channel), lambda entry, error: None)
    call = Call(CallHeader(1, 1, NO_ROOT, Kind.BROADCAST, 0, 0), Deadline.after(SOON))

    def wait() -> None:
        comparer.post(call)
        comparer.drain(0.0001)

    wait()
    assert at_every_step(wait, lambda: comparer.post(call), _CODE) > 3
    ending.set()
    comparer.close()


def test_messages_that_mpi_has() -> None:
    mpi = SimpleNamespace(ANY_SOURCE=-1, Status=lambda: None)
    process = SimpleNamespace(mpi=mpi, comm=SimpleNamespace(Improbe=lambda *_: None))
    membership = Membership("g", 0, (0, 1), HashStore(), Runtime())
    inbox = MpiInbox(cast("Any", process), membership, Mailbox(membership), 1)

    def wait() -> None:
        with inbox.wanting(1):
            pass

    wait()
    assert at_every_step(wait, wait, _CODE) > 2
    inbox.close()
