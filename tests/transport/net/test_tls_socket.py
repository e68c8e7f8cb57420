"""A TLS socket behaves like a plain one, under links too."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.net.certificates import tls_of_the_tests
from tests.support.net.resets import await_end, reset
from tests.support.net.tcp_pairs import LONG, call, linked, sockets
from tests.support.transport.rank_threads import run_threads
from transport._calls.header import Kind
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    PeerLostError,
)
from transport._link import exchange
from transport._net.reach import is_out_of_reach
from transport._net.sockets import recv_exact
from transport._net.tls import TlsSocket
from transport._tcp.link import TcpLink
from transport._waiting.deadline import Deadline


@contextlib.contextmanager
def tls_pair() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """The two ends of a TLS connection after its handshake: the client's, the server's."""
    tls = tls_of_the_tests()
    with sockets() as (ours, theirs), tls.client(ours) as client, tls.server(theirs) as server:
        ends = (client, server)
        run_threads([lambda end=end: end.handshake(Deadline.after(LONG)) for end in ends])
        yield ends


class TestSocket:
    """Where Python's own TLS sockets differ from plain ones, ours does not."""

    def test_one_thread_may_send_while_another_receives(self) -> None:
        size = 20_000_000
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
        with tls_pair() as ends:

            def receive(end: TlsSocket) -> None:
                assert recv_exact(end, size, Deadline.after(LONG)) == data

            for end in ends:
                end.settimeout(LONG)
            run_threads(
                [lambda end=end: end.sendall(data) for end in ends]
                + [lambda end=end: receive(end) for end in ends]
            )

    def test_flags(self) -> None:
        with tls_pair() as (ours, theirs):
            with pytest.raises(BlockingIOError):
                ours.recv(10, socket.MSG_DONTWAIT)
            assert theirs.sendmsg((b"head", b"body"), (), socket.MSG_NOSIGNAL) == 8
            assert recv_exact(ours, 8, Deadline.after(LONG)) == b"headbody"
            data = bytes(1 << 20)
            with pytest.raises(BlockingIOError):  # noqa: PT012 (which one does not matter)
                while True:
                    ours.send(data, socket.MSG_DONTWAIT)

    def test_sending_to_an_end_that_has_closed_is_a_lost_connection(self) -> None:
        with tls_pair() as (ours, theirs):
            theirs.close()
            ours.settimeout(LONG)
            with pytest.raises(ConnectionError):  # noqa: PT012 (the first may still get through)
                while True:
                    ours.send(b"body")

    @pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
    @pytest.mark.parametrize("end", ["client", "server"])
    def test_what_is_lost_before_tls_begins_is_a_lost_connection(
        self, end: str, sent: bytes
    ) -> None:
        with sockets() as (ours, theirs):
            theirs.sendall(sent)
            reset(theirs)
            await_end(ours)
            with getattr(tls_of_the_tests(), end)(ours) as sock:
                with pytest.raises(ConnectionError, match="hung up"):
                    sock.handshake(Deadline.after(LONG))
                for use in (lambda: sock.recv(1), lambda: sock.send(b"in the open")):
                    with pytest.raises(OSError, match="not connected"):
                        use()

    @pytest.mark.parametrize("uses", [("send", "recv"), ("recv", "send")])
    def test_what_the_kernel_gives_up_has_not_ended(self, uses: tuple[str, str]) -> None:
        """After what had come before, whatever asks first is told; here the window stays shut."""
        with tls_pair() as (ours, theirs):
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            theirs.send(b"last words")
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100)
            piece = bytes(16 << 10)
            with pytest.raises(BlockingIOError):  # noqa: PT012 (which one does not matter)
                while True:
                    ours.send(piece, socket.MSG_DONTWAIT)
            await_end(ours)
            ours.settimeout(LONG)
            if uses[0] == "recv":
                assert ours.recv(100) == b"last words"
            for use in uses:
                with pytest.raises(TimeoutError) as given_up:
                    ours.send(piece) if use == "send" else recv_exact(
                        ours, 100, Deadline.after(LONG)
                    )
                assert given_up.value.errno == errno.ETIMEDOUT
                assert is_out_of_reach(given_up.value)

    def test_time_limits(self) -> None:
        with tls_pair() as (ours, _):
            ours.settimeout(0.05)
            with pytest.raises(TimeoutError):
                ours.recv(1)
            ours.settimeout(None)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000))
            with pytest.raises(BlockingIOError):
                ours.recv(1)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 50_000))
            with pytest.raises(BlockingIOError):
                ours.sendall(bytes(100_000_000))
            ours.setblocking(False)
            with pytest.raises(BlockingIOError):
                ours.recv(1)

    def test_after_half_a_record_only_its_rest_can_be_sent(self) -> None:
        with tls_pair() as (ours, theirs):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            data = np.random.default_rng(1).integers(0, 256, 4_000_000, np.uint8).data
            sent = 0
            with pytest.raises(BlockingIOError):  # noqa: PT012 (which one does not matter)
                while True:
                    sent += ours.send(data[sent:], socket.MSG_DONTWAIT)
            assert ours._begun is not None
            with pytest.raises(ConnectionAbortedError, match="middle of a record"):
                ours.send(b"something else", socket.MSG_DONTWAIT)
            with ThreadPoolExecutor(1) as pool:
                received = pool.submit(recv_exact, theirs, len(data), Deadline.after(LONG))
                ours.sendall(data[sent:])
                assert received.result(LONG) == data

    def test_shutdown_wakes_a_receiver_and_does_not_end_encryption(self) -> None:
        with tls_pair() as (ours, theirs):
            timer = threading.Timer(0.1, ours.shutdown, (socket.SHUT_RDWR,))
            timer.start()
            assert ours.recv(1) == b""
            timer.join()
            theirs.settimeout(LONG)
            assert theirs.recv(1) == b""

    def test_what_was_sent_before_close_arrives(self) -> None:
        """Also where the closing end has never read: nothing lies in its buffer unread."""
        with tls_pair() as (client, server), ThreadPoolExecutor(1) as pool:
            size = 3_000_000
            received = pool.submit(recv_exact, server, size, Deadline.after(LONG))
            client.sendall(bytes(size))
            client.shutdown(socket.SHUT_RDWR)
            client.close()
            assert received.result(LONG) == bytes(size)
            server.settimeout(LONG)
            assert server.recv(1) == b""

    def test_records_that_were_altered_are_refused(self) -> None:
        tls = tls_of_the_tests()
        with sockets() as (ours, theirs):
            raw = ours.dup()
            with raw, tls.client(ours) as client, tls.server(theirs) as server:
                ends = (client, server)
                run_threads([lambda end=end: end.handshake(Deadline.after(LONG)) for end in ends])
                raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
                server.settimeout(LONG)
                with pytest.raises(ssl.SSLError, match=r"MAC|RECORD_LAYER"):
                    server.recv(10)

    def test_peer_that_is_gone_before_it_is_wrapped(self) -> None:
        tls = tls_of_the_tests()
        with sockets() as (ours, theirs):
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
            theirs.close()
            with contextlib.suppress(ConnectionError):
                ours.recv(1)
            with tls.client(ours) as sock, pytest.raises(OSError):
                sock.handshake(Deadline.after(LONG))

    def test_a_forked_child_has_no_copy(self) -> None:
        with tls_pair() as (ours, _):
            number = ours.fileno()
            child = os.fork()
            if child == 0:
                try:
                    os.fstat(number)
                except OSError:
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestLink:
    @contextlib.contextmanager
    def links(self) -> Iterator[tuple[TcpLink, TcpLink]]:
        with tls_pair() as (ours, theirs), linked(ours, theirs) as pair:
            yield pair

    @pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 16_385, 5_000_001])
    @pytest.mark.parametrize("polls", [False, True])
    def test_exchange(self, size: int, polls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where the link polls, as close to the deadline: what TLS has read is not missed."""
        if polls:
            monkeypatch.setattr("transport._tcp.link.SLICE_SECONDS", int(2 * LONG))
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8).data
        with self.links() as pair:

            def side(link: TcpLink) -> None:
                # Two frames in a row: a record may have the end of one and all of the next.
                for sequence in range(4):
                    into = memoryview(bytearray(size))
                    exchange(call(sequence), link, data, link, into)
                    assert into == data

            run_threads([lambda link=link: side(link) for link in pair])

    def test_abort_wakes_both_ends(self) -> None:
        with self.links() as (ours, theirs):
            timer = threading.Timer(0.1, ours.abort)
            timer.start()

            def wait(link: TcpLink, error: type[Exception]) -> None:
                with pytest.raises(error):
                    link.recv_into(call(kind=Kind.BARRIER), memoryview(bytearray(8)))

            run_threads(
                [lambda: wait(ours, CommunicatorAbortedError), lambda: wait(theirs, PeerLostError)]
            )
            timer.join()

    def test_abort_gets_past_a_peer_that_does_not_read(self) -> None:
        with self.links() as (ours, _):
            timer = threading.Timer(0.2, ours.abort)
            timer.start()
            with pytest.raises(CommunicatorAbortedError):
                ours.send(call(), memoryview(bytes(100_000_000)))
            timer.join()

    def test_waiting_leaves_the_core_to_others(self) -> None:
        with self.links() as (ours, _):
            before = time.thread_time()
            with pytest.raises(CommunicatorTimeoutError):
                ours.recv_into(call(seconds=1.5), memoryview(bytearray(8)))
            assert time.thread_time() - before < 0.5
