"""The handshake: friends pass, nobody else does, and each end learns why."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport._errors import AuthenticationError
from transport._net.auth import (
    MAX_UNPROVEN_BYTES,
    Handshake,
    HandshakeInterruptedError,
    authenticate,
    new_secret,
)
from transport._net.secret_file import secret_from_environment
from transport._net.sockets import recv_exact
from transport._waiting.deadline import Deadline

SOON = 30.0
Outcome = str | None


def outcome(
    sock: socket.socket, secret: bytes | None, *, initiator: bool, seconds: float
) -> Outcome:
    """Return what the handshake ended with, None when it succeeded, and close the socket."""
    with sock:
        try:
            authenticate(sock, secret, Deadline.after(seconds), initiator=initiator)
        except AuthenticationError as error:
            return str(error)
        return None


def meet(secret: bytes | None, other_secret: bytes | None) -> tuple[Outcome, Outcome]:
    """Return what the initiator and the acceptor end with."""
    one, other = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(outcome, other, other_secret, initiator=False, seconds=SOON)
        return outcome(one, secret, initiator=True, seconds=SOON), accepted.result(SOON)


def against(
    stranger: Callable[[socket.socket], object],
    *,
    initiator: bool = False,
    secret: bytes | None = b"s",
    seconds: float = SOON,
) -> Outcome:
    """Return what one end ends with when the other is a stranger."""
    one, other = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, other:
        other.settimeout(SOON)
        result = pool.submit(outcome, one, secret, initiator=initiator, seconds=seconds)
        stranger(other)
        return result.result(SOON)


def receive(sock: socket.socket, size: int) -> bytes:
    return recv_exact(sock, size, Deadline.after(SOON))


@pytest.mark.parametrize("secret", [b"s", bytes(32), b"x" * 1000, None, b""])
def test_friends(secret: bytes | None) -> None:
    assert meet(secret, secret) == (None, None)


def test_another_secret() -> None:
    initiator, acceptor = meet(b"one", b"other")
    assert initiator is not None
    assert "refused our proof: it has another secret" in initiator
    assert acceptor is not None
    assert "has another secret (wrong proof)" in acceptor


@pytest.mark.parametrize("with_secret", ["initiator", "acceptor"])
def test_a_secret_on_one_end_only(with_secret: str) -> None:
    secrets = (b"s", None) if with_secret == "initiator" else (None, b"s")
    initiator, acceptor = meet(*secrets)
    mine, theirs = (
        "this end has a secret and the other end has none",
        "the other end has a secret and this end has none",
    )
    if with_secret == "acceptor":
        mine, theirs = theirs, mine
    assert initiator is not None
    assert mine in initiator
    assert "MESHLIB_SECRET" in initiator
    assert acceptor is not None
    assert theirs in acceptor


@pytest.mark.parametrize("initiator", [True, False])
def test_random_bytes(initiator: bool) -> None:
    found = against(lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n" * 20), initiator=initiator)
    assert found is not None
    assert "wrong first bytes" in found


def test_another_version() -> None:
    hello = bytearray(Handshake(b"s", initiator=True).start())
    hello[8] = 99
    found = against(lambda sock: sock.sendall(hello))
    assert found is not None
    assert "speaks protocol version 99, this end 1" in found


@pytest.mark.parametrize("initiator", [True, False])
def test_silence(initiator: bool) -> None:
    found = against(lambda _: None, initiator=initiator, seconds=0.05)
    assert found is not None
    assert "sent nothing for 0.05 s" in found


def test_bytes_that_trickle() -> None:
    """Each byte does not buy more time."""

    def trickle(sock: socket.socket) -> None:
        hello = Handshake(b"s", initiator=True).start()
        with pytest.raises(OSError):  # noqa: PT012 (which send it is does not matter)
            for byte in hello[:-1]:
                sock.send(bytes([byte]))
                sock.settimeout(0.02)
                try:
                    if not sock.recv(1):
                        raise ConnectionError
                except TimeoutError:
                    pass
            sock.settimeout(SOON)
            if not sock.recv(1):
                raise ConnectionError

    found = against(trickle, seconds=0.15)
    assert found is not None
    assert "sent nothing for 0.15 s" in found


@pytest.mark.parametrize(
    ("sent", "message"), [(0, "hung up before its hello"), (20, "the connection ended after 20 of")]
)
def test_an_end_in_the_middle(sent: int, message: str) -> None:
    def leave(sock: socket.socket) -> None:
        sock.sendall(Handshake(b"s", initiator=True).start()[:sent])
        sock.close()

    found = against(leave)
    assert found is not None
    assert message in found


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_an_end_that_is_out_of_reach_has_not_refused(number: int, answered: bool) -> None:
    """Where the kernel gives a connection up, at any point."""
    one, other = socket.socketpair()
    acceptor = Handshake(b"s", initiator=False)

    class Broken(socket.socket):
        arrives = answered

        def recv_into(self, *arguments: Any) -> int:
            if not self.arrives:
                raise OSError(number, os.strerror(number))
            self.arrives = False
            other.sendall(acceptor.receive(recv_exact(other, 42, Deadline.after(SOON))))
            return super().recv_into(*arguments)

    with (
        other,
        Broken(fileno=one.detach()) as broken,
        pytest.raises(HandshakeInterruptedError, match="is out of reach") as caught,
    ):
        authenticate(broken, b"s", Deadline.after(SOON), initiator=True)
    assert not caught.value.refused
    assert "secret" not in str(caught.value)


def test_an_initiators_proof_cannot_be_reflected() -> None:
    """A server without the secret gives the client's own messages back to it."""

    def mirror(sock: socket.socket) -> None:
        sock.sendall(receive(sock, 42))
        sock.sendall(receive(sock, 32))

    found = against(mirror, initiator=True)
    assert found is not None
    assert "wrong proof" in found


def test_a_server_is_no_oracle_for_its_own_clients() -> None:
    """A stranger who passes another acceptor's messages on as its own proof is refused."""
    real = Handshake(b"s", initiator=False)

    def stranger(sock: socket.socket) -> None:
        # It makes another acceptor answer the hello that it got, and has no proof to give it.
        sock.sendall(Handshake(b"s", initiator=True).start())
        receive(sock, 42)
        real.receive(Handshake(b"s", initiator=True).start())
        sock.sendall(bytes(32))

    found = against(stranger)
    assert found is not None
    assert "wrong proof" in found


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    """An eavesdropper sends again what a friend sent: the acceptor's fresh bytes differ."""
    initiator, acceptor = Handshake(b"s", initiator=True), Handshake(b"s", initiator=False)
    hello = initiator.start()
    proof = initiator.receive(acceptor.receive(hello))
    assert acceptor.receive(proof)
    assert acceptor.wanted == 0
    assert acceptor.refusal is None

    def replay(sock: socket.socket) -> None:
        sock.sendall(hello)
        receive(sock, 42)
        sock.sendall(proof)

    found = against(replay)
    assert found is not None
    assert "wrong proof" in found


def test_a_stranger_gets_no_proof() -> None:
    """No byte before the magic was right, no proof before the stranger's."""
    acceptor = Handshake(b"s", initiator=False)
    assert acceptor.start() == b""
    assert acceptor.receive(bytes(acceptor.wanted)) == b""
    acceptor = Handshake(b"s", initiator=False)
    answer = acceptor.receive(Handshake(b"s", initiator=True).start())
    assert len(answer) == 42
    assert acceptor.receive(bytes(acceptor.wanted)) == b""
    assert acceptor.refusal is not None


def test_bytes_behind_the_handshake_are_the_users() -> None:
    one, other = socket.socketpair()
    with one, other, ThreadPoolExecutor(1) as pool:
        deadline = Deadline.after(SOON)
        accepted = pool.submit(authenticate, other, b"s", deadline, initiator=False)
        authenticate(one, b"s", deadline, initiator=True)
        one.sendall(b"data")
        accepted.result(SOON)
        assert receive(other, 4) == b"data"


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200), initiator=st.booleans(), magic=st.booleans())
def test_no_bytes_pass(data: bytes, initiator: bool, magic: bool) -> None:
    """Whatever a stranger says, it proves nothing, and only a few bytes of it are read."""
    stream = (Handshake(b"s", initiator=True).start() if magic else b"") + data
    handshake = Handshake(b"s", initiator=initiator)
    read = 0
    while handshake.wanted and len(stream) - read >= handshake.wanted:
        piece = stream[read : read + handshake.wanted]
        read += len(piece)
        handshake.receive(piece)
    assert handshake.wanted or handshake.refusal
    assert read <= MAX_UNPROVEN_BYTES


def test_secrets_of_jobs() -> None:
    assert len(new_secret()) == 32
    assert new_secret() != new_secret()
    assert secret_from_environment({}) is None
    assert secret_from_environment({"MESHLIB_SECRET": ""}) is None
    assert secret_from_environment({"MESHLIB_SECRET": "00ff"}) == b"\x00\xff"
    with pytest.raises(ValueError, match="MESHLIB_SECRET must be hexadecimal") as caught:
        secret_from_environment({"MESHLIB_SECRET": "password"})
    assert "password" not in str(caught.value)
