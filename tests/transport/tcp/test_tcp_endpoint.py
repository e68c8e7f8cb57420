"""The endpoint: who gets in, who is kept waiting, and that strangers change nothing."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport._errors import AuthenticationError
from transport._net.auth import Handshake, authenticate
from transport._tcp.meeting import endpoint as endpoint_module
from transport._tcp.meeting.endpoint import TcpEndpoint
from transport._tcp.meeting.hello import HELLO_BYTES, WELCOME, Hello, TrafficKind, digest_of
from transport._waiting.deadline import Deadline

LONG = 60.0
SECRET = b"the secret of the job"


@dataclass
class Door:
    """An endpoint, and what it has delivered for the group ``g``."""

    endpoint: TcpEndpoint
    delivered: queue.Queue[tuple[Hello, socket.socket]] = field(default_factory=queue.Queue)

    def deliver(self, hello: Hello, sock: socket.socket) -> None:
        sock.send(WELCOME)
        self.delivered.put((hello, sock))

    def knock(self) -> socket.socket:
        address = self.endpoint.address
        sock = socket.create_connection((address.host, address.port), LONG)
        sock.settimeout(LONG)
        return sock

    def hello(self, group: str = "g", rank: int = 3, token: str | None = None) -> bytes:
        token = token or self.endpoint.address.token
        hello = Hello(bytes.fromhex(token), digest_of(group), rank, TrafficKind.COLLECTIVE)
        return hello.pack()

    def enter(self, hello: bytes | None = None, secret: bytes | None = SECRET) -> socket.socket:
        sock = self.knock()
        try:
            authenticate(sock, secret, Deadline.after(LONG), initiator=True)
            sock.sendall(self.hello() if hello is None else hello)
            sock.settimeout(LONG)
        except BaseException:
            sock.close()
            raise
        return sock

    def expect(self) -> Hello:
        hello, sock = self.delivered.get(timeout=LONG)
        sock.close()
        return hello


@contextlib.contextmanager
def opened(
    secret: bytes | None = SECRET, host: str = "127.0.0.1", held: int = 64
) -> Iterator[Door]:
    endpoint = TcpEndpoint(secret, host, held)
    try:
        yield Door(endpoint)
    finally:
        endpoint.close()
        endpoint.close()


@pytest.fixture
def door() -> Iterator[Door]:
    with opened() as found:
        found.endpoint.register("g", found.deliver)
        yield found


def hung_up(sock: socket.socket) -> bool:
    """True if the other end closes without a word."""
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_member_is_delivered_and_welcomed(host: str, secret: bytes | None) -> None:
    with opened(secret, host) as door:
        door.endpoint.register("g", door.deliver)
        with door.enter(secret=secret) as sock:
            assert sock.recv(1) == WELCOME
            assert door.expect()[2:] == (3, TrafficKind.COLLECTIVE, 0, 1)


def test_a_hello_may_arrive_in_pieces(door: Door) -> None:
    with door.enter(hello=b"") as sock:
        for i in range(HELLO_BYTES):
            sock.sendall(door.hello()[i : i + 1])
        assert sock.recv(1) == WELCOME
        door.expect()


def test_a_connection_before_the_group_is_made_is_held(door: Door) -> None:
    with door.enter(door.hello("later")) as sock, door.enter() as other:
        assert other.recv(1) == WELCOME  # and so the first one is in
        door.expect()
        assert door.delivered.empty()
        door.endpoint.register("later", door.deliver)
        assert door.expect().group == digest_of("later")
        assert sock.recv(1) == WELCOME


def test_a_connection_after_the_group_is_closed_is_refused(door: Door) -> None:
    door.endpoint.unregister("g")
    door.endpoint.unregister("g")
    with door.enter() as sock:
        assert hung_up(sock)


def test_those_held_are_bounded_and_the_oldest_go() -> None:
    with opened(held=8) as door, contextlib.ExitStack() as stack:
        held = [stack.enter_context(door.enter(door.hello("later", rank))) for rank in range(10)]
        assert all(hung_up(sock) for sock in held[:2])
        door.endpoint.register("later", door.deliver)
        assert sorted(door.expect().rank for _ in range(8)) == list(range(2, 10))


@pytest.mark.parametrize("secret", [None, b"another"])
def test_without_the_secret_nobody_gets_in(door: Door, secret: bytes | None) -> None:
    with pytest.raises(AuthenticationError, match="secret"):
        door.enter(secret=secret)
    assert door.delivered.empty()


def test_a_replayed_handshake_is_refused(door: Door) -> None:
    """Bytes that let somebody in once let nobody in again."""
    genuine = Handshake(SECRET, initiator=True)
    first = genuine.start()
    with door.knock() as sock:
        sock.sendall(first)
        proof = genuine.receive(sock.recv(genuine.wanted, socket.MSG_WAITALL))
        sock.sendall(proof)
        assert len(sock.recv(genuine.wanted, socket.MSG_WAITALL)) == genuine.wanted
    with door.knock() as sock:
        sock.sendall(first)
        sock.recv(len(first), socket.MSG_WAITALL)
        sock.sendall(proof + door.hello())
        assert hung_up(sock)
    assert door.delivered.empty()


def test_who_looks_for_the_endpoint_that_had_the_port_before_is_refused(door: Door) -> None:
    with door.enter(door.hello(token="00" * 16)) as sock:
        assert hung_up(sock)
    assert door.delivered.empty()


def test_a_connection_without_a_hello_is_dropped(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_SECONDS", 0.2)
    with door.enter(hello=door.hello()[:-1]) as sock:
        assert hung_up(sock)
    with door.enter(hello=b"") as sock:
        sock.shutdown(socket.SHUT_WR)
        assert hung_up(sock)
    assert door.delivered.empty()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(min_size=1, max_size=300), authenticated=st.booleans())
def test_random_bytes_open_nothing(door: Door, data: bytes, authenticated: bool) -> None:
    with door.enter(hello=data) if authenticated else door.knock() as sock:
        if not authenticated:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert hung_up(sock)
    assert door.delivered.empty()


def test_a_crowd_of_silent_connections_keeps_nobody_out(door: Door) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    crowd = 10_000 if hard >= 25_000 else hard // 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * crowd + 500)), hard))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(crowd):
                stack.enter_context(door.knock())
            with door.enter() as sock:
                assert sock.recv(1) == WELCOME
                door.expect()
            # Most have been dropped for newer ones already.
            assert len(os.listdir("/proc/self/fd")) < crowd + 2000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_close_leaves_no_thread_and_no_descriptor() -> None:
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    with opened() as door:
        door.endpoint.register("g", door.deliver)
        with door.enter(door.hello("later")), door.knock(), door.enter(b""), door.enter():
            door.expect()
    assert not set(threading.enumerate()) - threads
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_a_forked_child_keeps_nothing_open(door: Door) -> None:
    """Else the rank would seem to live, and to listen, for as long as its child does."""
    with door.enter() as sock:
        assert sock.recv(1) == WELCOME
        _, accepted = door.delivered.get(timeout=LONG)
        listener = door.endpoint._acceptor._listener
        numbers = [accepted.fileno(), listener.fileno()]
        child = os.fork()
        if child == 0:
            kept = 0
            for number in numbers:
                with contextlib.suppress(OSError):
                    os.fstat(number)
                    kept += 1
            os._exit(kept)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        accepted.close()
