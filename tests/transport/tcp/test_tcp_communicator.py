"""The TCP communicator beyond the conformance suite: messages, and failures."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.net.tcp_members import all_reduce, enter, member_of, ones
from tests.support.transport.rank_threads import LONG, run_threads
from transport._calls.call import Call
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._errors import (
    PeerLostError,
)
from transport._operands.reduce_op import ReduceOp
from transport._store.hash_store import HashStore
from transport._store.tcp.store import TCPStore
from transport._tcp import TcpCommunicator
from transport._tcp.frame import pack_prefix
from transport._tcp.meeting.hello import TrafficKind
from transport._waiting.deadline import Deadline

PROGRAMS = Path(__file__).parent / "programs"

# Point to point.


def test_members_that_write_to_each_other_first_keep_their_order(store: HashStore) -> None:
    """Both connect at the same moment; each message must come behind the one before."""
    gate = threading.Barrier(2, timeout=LONG)
    count = 30

    def body(rank: int) -> None:
        for attempt in range(8):
            with member_of(store, rank, group=f"group {attempt}") as member:
                gate.wait()
                for i in range(count):
                    member.send(np.full(3, i, np.int64), 1 - rank)
                into = np.empty(3, np.int64)
                for i in range(count):
                    member.recv(into, 1 - rank)
                    assert (into == i).all()
                gate.wait()

    run_threads([lambda: body(0), lambda: body(1)])


def _frame(kind: Kind, announced: int) -> bytes:
    header = CallHeader(0, 4, NO_ROOT, kind, 11, 0)
    return pack_prefix(Call(header, Deadline.after(LONG)), announced)


@pytest.mark.parametrize(
    "frame",
    [
        _frame(Kind.SEND, 1 << 60),
        _frame(Kind.SEND, 1 << 44),
        _frame(Kind.SEND, (1 << 64) - 1),
        _frame(Kind.ALL_REDUCE, 16),
        _frame(Kind.SEND, 16) + b"half",
        b"\xff" * 200,
    ],
    ids=["huge", "larger than memory", "larger than any", "no message", "half", "noise"],
)
@pytest.mark.parametrize("awaited", [False, True])
def test_nonsense_from_a_member_ends_its_connection_only(
    store: HashStore, frame: bytes, awaited: bool
) -> None:
    with (
        member_of(store, 0, (0, 1, 2)) as member,
        enter(store, 0, 1, TrafficKind.POINT_TO_POINT) as sock,
    ):
        if not awaited:
            sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)
        timer = threading.Timer(0.1, lambda: (sock.sendall(frame), sock.shutdown(socket.SHUT_WR)))
        if awaited:
            timer.start()
        buffer = ones()
        with pytest.raises(PeerLostError, match="rank 1") as lost:
            member.recv(buffer, 1)
        assert lost.value.peer == 1
        if awaited:
            timer.join()
        # Others are not concerned.
        with member_of(store, 2, (0, 1, 2)) as other:
            other.send(2 * ones(), 0)
            member.recv(buffer, 2)
        assert (buffer == 2).all()


def test_a_hello_with_a_rank_that_cannot_be_is_refused(store: HashStore) -> None:
    with member_of(store, 0):
        for rank in (0, 2, 4_000_000_000):
            with pytest.raises((AssertionError, ConnectionError)):
                enter(store, 0, rank, TrafficKind.POINT_TO_POINT)


# Processes.

MEMBER_SCRIPT = (PROGRAMS / "member.py").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("what", ["small", "large", "recv"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_member_is_missed_at_once(what: str, size: int) -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True, secret=None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER_SCRIPT, str(rank), str(size), str(master.port), what],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # the others wait for it by now
        processes[-1].send_signal(signal.SIGKILL)
        for process in processes[:-1]:
            output, _ = process.communicate(timeout=LONG)
            assert process.returncode == 0, output
            assert output.startswith("lost ")
        # A rank connected to the victim names it; the others name the rank that reported it.
        assert "rank 1" in output
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        master.close()


def test_a_communicator_leaves_no_thread_and_no_descriptor(store: HashStore) -> None:
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))

    def body(rank: int) -> None:
        with member_of(store, rank, (0, 1, 2)) as member:
            all_reduce(member)
            member.send(ones(), (rank + 1) % 3)
            member.recv(ones(), (rank - 1) % 3)
            member.barrier()

    run_threads([lambda rank=rank: body(rank) for rank in range(3)])
    assert not set(threading.enumerate()) - threads
    assert set(os.listdir("/proc/self/fd")) <= descriptors


class TestWaitingForOneThatIsLate:
    """Over a connection for messages, which costs no thread."""

    def test_leaves_no_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transport._tcp.communicator._FIRST_WAIT_SECONDS", 0.0)
        store = HashStore()
        begun, before = threading.Event(), set(threading.enumerate())
        dial = TcpCommunicator._dial

        def noted(comm: TcpCommunicator, peer: int, channel: TrafficKind, *arguments: Any) -> Any:
            if channel == TrafficKind.POINT_TO_POINT:
                begun.set()
            return dial(comm, peer, channel, *arguments)

        monkeypatch.setattr(TcpCommunicator, "_dial", noted)

        def run(rank: int) -> None:
            with member_of(store, rank) as member:
                assert rank == 0 or begun.wait(LONG)
                member.all_reduce(np.ones(2), ReduceOp.SUM)

        run_threads([lambda: run(0), lambda: run(1)])
        assert not set(threading.enumerate()) - before

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_that_leaves_instead(self, end: str) -> None:
        store = HashStore()
        watched = threading.Event()

        def wait() -> None:
            with member_of(store, 0) as member, pytest.raises(PeerLostError) as caught:
                member.all_reduce(np.ones(2), ReduceOp.SUM)
            assert caught.value.peer == 1

        def leave() -> None:
            with member_of(store, 1) as member:
                comm: Any = member.comm
                while not comm._messages.links:
                    time.sleep(0.001)
                watched.set()
                if end == "abort":
                    comm.abort("the test wants it")

        run_threads([wait, leave])
        assert watched.is_set()
