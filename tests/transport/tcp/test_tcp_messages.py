"""Messages over TCP whose receivers read them, by turns with the endpoint's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group, run_threads
from transport._errors import CommunicatorAbortedError, CommunicatorTimeoutError, PeerLostError
from transport._tcp import TcpCommunicator
from transport._tcp.inbox import MessageWorker

TCP = Transport("tcp", TcpCommunicator)
LARGE = 3_000_000


def number(value: float) -> np.ndarray:
    return np.array([value], np.float64)


def ping_pong(member: Member, rounds: int = 5) -> None:
    """Play until receivers read for themselves."""
    ball, other = number(0), 1 - member.rank
    for i in range(rounds):
        if member.rank == i % 2:
            member.send(number(i), other)
        else:
            member.recv(ball, other)
            assert ball[0] == i


def worker_of(member: Member) -> MessageWorker:
    comm: Any = member.comm
    return comm._messages


def run_two(zero: Callable[[Member], Any], one: Callable[[Member], Any]) -> None:
    """Run one function on each of two ranks that have talked before."""
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        ping_pong(member)
        gate.wait()
        (one if member.rank else zero)(member)
        gate.wait()

    run_group(TCP, 2, body)


def test_a_receiver_reads_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # The endpoint's thread must not take an interrupted receiver for one that has gone.
    monkeypatch.setattr("transport._tcp.inbox._AWAY_SECONDS", LONG)

    def zero(member: Member) -> None:
        for i in range(20):
            member.send(number(i), 1)
            member.recv(number(0), 1)

    def one(member: Member) -> None:
        readers = list[threading.Thread]()
        worker: Any = worker_of(member)
        read = worker._read

        def noted(*arguments: Any) -> bool:
            moved = read(*arguments)
            if moved:
                readers.append(threading.current_thread())
            return moved

        worker._read = noted
        for _ in range(20):
            member.recv(number(0), 0)
            member.send(number(1), 0)
        # The thread reads at most what comes before it notices a receiver.
        assert readers.count(threading.current_thread()) >= 18

    run_two(zero, one)


def test_the_thread_reads_again_when_nobody_receives() -> None:
    """Both send more than the sockets take before either receives."""

    def side(member: Member) -> None:
        other = 1 - member.rank
        for i in range(3):
            member.send(np.full(LARGE, i + member.rank, np.uint8), other)
            got = np.zeros(LARGE, np.uint8)
            member.recv(got, other)
            assert (got == i + other).all()

    run_two(side, side)


def test_who_reads_delivers_to_everybody() -> None:
    tags = range(1, 6)

    def zero(member: Member) -> None:
        for i in range(10):
            for tag in reversed(tags):
                member.send(number(100 * tag + i), 1, tag)

    def one(member: Member) -> None:
        def receive(tag: int) -> None:
            got = number(0)
            for i in range(10):
                member.recv(got, 0 if tag % 2 else None, tag)
                assert got[0] == 100 * tag + i

        run_threads([lambda tag=tag: receive(tag) for tag in tags])

    run_two(zero, one)


@pytest.mark.parametrize("src", [0, None])
def test_a_receiver_that_leaves_hands_the_reading_on(src: int | None) -> None:
    waiting = threading.Event()

    def zero(member: Member) -> None:
        waiting.wait(LONG)
        member.send(number(1), 1, tag=1)
        time.sleep(0.05)
        member.send(number(2), 1, tag=2)

    def one(member: Member) -> None:
        def first() -> None:
            member.recv(number(0), 0, tag=1)

        def second() -> None:
            deadline = time.monotonic() + LONG
            worker: Any = worker_of(member)
            while worker._turn.acquire(blocking=False):  # until the first one reads
                worker._turn.release()
                assert time.monotonic() < deadline
                time.sleep(0.001)
            threading.Timer(0.05, waiting.set).start()
            got = number(0)
            assert member.recv(got, src, tag=2) == 0
            assert got[0] == 2

        run_threads([first, second])

    run_two(zero, one)


def test_a_deadline_in_the_middle_of_a_message_loses_no_other() -> None:
    late = threading.Event()

    def zero(member: Member) -> None:
        comm: Any = member.comm
        link = comm._message_links[1]
        send = link.first.send

        class Slow:
            """The socket, that keeps back the end of what it is given."""

            def __getattr__(self, name: str) -> Any:
                return getattr(sock, name)

            def sendmsg(self, buffers: Any, ancillary: Any, flags: int) -> int:
                return sock.sendmsg([bytes(buffers[0]), bytes(buffers[1][:1000])], (), flags)

            def send(self, data: Any, flags: int = 0) -> int:
                late.wait(LONG)
                return send(data, flags)

        sock, again = link.first, number(1)
        while again[0]:
            link.sockets = (Slow(),)
            member.send(np.full(LARGE, 7, np.uint8), 1)
            link.sockets = (sock,)
            member.send(number(8), 1, tag=1)
            member.recv(again, 1)

    def one(member: Member) -> None:
        comm: Any = member.comm
        seconds = 0.2
        while True:
            with pytest.raises(CommunicatorTimeoutError, match="rank 0"):
                member.recv(np.zeros(LARGE, np.uint8), 0, timeout=seconds)
            late.set()
            got = number(0)
            member.recv(got, 0, tag=1)
            assert got[0] == 8
            if not comm.mailbox.left_over():
                break
            # It had not begun to come, and is still to be received.
            member.recv(np.zeros(LARGE, np.uint8), 0)
            late.clear()
            seconds *= 2
            member.send(number(1), 0)
        member.send(number(0), 0)

    run_two(zero, one)


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("whose", ["own", "peer"])
def test_whoever_reads_learns_of_the_end(how: str, whose: str) -> None:
    reading = threading.Event()

    def zero(member: Member) -> None:
        reading.wait(LONG)
        time.sleep(0.05)
        if whose == "peer":
            member.comm.abort("enough") if how == "abort" else member.comm.close()

    def one(member: Member) -> None:
        reading.set()
        if whose == "own":
            end = member.comm.close if how == "close" else lambda: member.comm.abort("enough")
            threading.Timer(0.1, end).start()
        expected = CommunicatorAbortedError if whose == "own" else PeerLostError
        with pytest.raises(expected):
            member.recv(number(0), 0)

    run_two(zero, one)


def test_the_messages_of_several_threads_do_not_mix() -> None:
    size, each = 300_000, 5

    def zero(member: Member) -> None:
        def send(thread: int) -> None:
            for _ in range(each):
                member.send(np.full(size, thread, np.uint8), 1)

        run_threads([lambda i=i: send(i) for i in range(3)])

    def one(member: Member) -> None:
        seen = list[int]()
        for _ in range(3 * each):
            into = np.empty(size, np.uint8)
            member.recv(into, 0)
            assert (into == into[0]).all()
            seen.append(int(into[0]))
        assert sorted(seen) == sorted(list(range(3)) * each)

    run_two(zero, one)


def test_both_send_more_than_their_mailboxes_hold_and_receive_meanwhile() -> None:
    """Connections are left alone while the mailbox has no room, and read when it has."""
    size, each = 3_000_000, 8

    def side(member: Member) -> None:
        other = 1 - member.rank

        def send() -> None:
            for i in range(each):
                member.send(np.full(size, i, np.uint8), other, tag=i % 2)

        def receive() -> None:
            time.sleep(0.1)
            for tag in (1, 0):
                for i in range(tag, each, 2):
                    got = np.zeros(size, np.uint8)
                    member.recv(got, other, tag=tag)
                    assert (got == i).all()

        run_threads([send, receive])

    run_two(side, side)
