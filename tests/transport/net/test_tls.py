"""TLS between the processes of a job: who gets in, and what a wrong setting looks like."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.net.certificates import LONG_AGO, Authority, Files, tls_of_the_tests
from tests.support.net.tcp_pairs import LONG, sockets
from tests.support.transport.rank_threads import Member, Transport, run_group, run_threads
from transport._errors import (
    AuthenticationError,
    CommunicatorTimeoutError,
    DistNetworkError,
)
from transport._net import acceptor as acceptor_module
from transport._net.auth import HANDSHAKE_SECONDS, Handshake, authenticate
from transport._net.sockets import connect, recv_exact
from transport._net.tls import Tls, TlsSocket
from transport._net.tls_choice import tls_from_environment
from transport._operands.reduce_op import ReduceOp
from transport._store import TCPStore, TCPStoreServer
from transport._tcp import TcpCommunicator
from transport._tcp.meeting.endpoint import TcpEndpoint
from transport._tcp.meeting.hello import WELCOME, Hello, TrafficKind, digest_of
from transport._waiting.deadline import Deadline

SECRET = b"the secret of the job"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> Files:
    return authority.issue("rank")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A certificate of somebody else's authority."""
    return Authority(tmp_path_factory.mktemp("theirs")).issue("stranger")


@pytest.fixture(scope="module")
def impostor(files: Files, stranger: Files) -> Tls:
    """A peer that trusts our authority and has a certificate of another one."""
    return replace(stranger, ca=files.ca).tls()


class Server:
    """A store's server or a rank's endpoint, which a test connects to."""

    def __init__(self, kind: str, tls: Tls | None) -> None:
        if kind == "store":
            self._served: Any = TCPStoreServer(secret=SECRET, host="127.0.0.1", tls=tls)
            self.address = self._served.address
        else:
            self._served = TcpEndpoint(SECRET, "127.0.0.1", tls=tls)
            self._served.register("g", lambda _, sock: (sock.send(WELCOME), sock.close()))
            self.address = (self._served.address.host, self._served.address.port)
            self._token = bytes.fromhex(self._served.address.token)
        self.kind = kind

    def enter(self, tls: Tls | None, secret: bytes = SECRET) -> None:
        """Prove as a client with ``tls`` that it is let in, and served."""
        if self.kind == "store":
            with TCPStore(*self.address, timeout=LONG, secret=secret, tls=tls) as store:
                store.set("key", b"value")
                assert store.get("key") == b"value"
            return
        with self.knock() as plain, tls.client(plain) if tls else plain as sock:
            authenticate(sock, secret, Deadline.after(LONG), initiator=True)
            sock.sendall(Hello(self._token, digest_of("g"), 3, TrafficKind.COLLECTIVE).pack())
            assert recv_exact(sock, len(WELCOME), Deadline.after(LONG)) == WELCOME

    def knock(self) -> socket.socket:
        sock = connect(*self.address, Deadline.after(LONG))
        sock.settimeout(LONG)
        return sock

    def close(self) -> None:
        self._served.close()


@contextlib.contextmanager
def serving(kind: str, tls: Tls | None) -> Iterator[Server]:
    server = Server(kind, tls)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(params=["store", "rank"])
def server(request: pytest.FixtureRequest, files: Files) -> Iterator[Server]:
    with serving(request.param, files.tls()) as server:
        yield server


class TestGettingIn:
    def test_members_are_let_in(self, server: Server, files: Files, authority: Authority) -> None:
        for _ in range(2):
            server.enter(files.tls())
        server.enter(authority.issue("another").tls())

    def test_the_secret_is_still_needed(self, server: Server, files: Files) -> None:
        with pytest.raises(AuthenticationError, match="another secret"):
            server.enter(files.tls(), b"wrong")

    def test_a_certificate_of_another_authority(self, server: Server, impostor: Tls) -> None:
        with pytest.raises(AuthenticationError, match="refused our certificate"):
            server.enter(impostor)

    def test_a_server_of_another_authority(self, server: Server, stranger: Files) -> None:
        with pytest.raises(AuthenticationError, match="MESHLIB_TLS_CA did not sign"):
            server.enter(stranger.tls())

    def test_a_certificate_that_has_expired(self, server: Server, authority: Authority) -> None:
        with pytest.raises(AuthenticationError, match=r"refused our certificate.*expired"):
            server.enter(authority.issue("late", LONG_AGO).tls())

    @pytest.mark.parametrize("kind", ["store", "rank"])
    def test_a_server_whose_certificate_has_expired(
        self, kind: str, authority: Authority, files: Files
    ) -> None:
        with (
            serving(kind, authority.issue("late", LONG_AGO).tls()) as late,
            pytest.raises(AuthenticationError, match="not valid at this machine's time") as caught,
        ):
            late.enter(files.tls())
        assert "has expired" in str(caught.value)
        assert "did not sign" not in str(caught.value)

    @pytest.mark.parametrize("kind", ["store", "rank"])
    def test_one_end_without_tls(self, kind: str, files: Files) -> None:
        """Each end that speaks TLS says which end does not."""
        with (
            serving(kind, None) as plain,
            pytest.raises(
                AuthenticationError, match="this end speaks TLS and the other end"
            ) as one,
        ):
            plain.enter(files.tls())
        with (
            serving(kind, files.tls()) as tls,
            pytest.raises(AuthenticationError, match="the other end speaks TLS and this") as other,
        ):
            tls.enter(None)
        for caught in (one, other):
            assert "MESHLIB_TLS_CERT" in str(caught.value)
            assert caught.value.refused

    def test_plain_bytes_cannot_claim_to_be_inside_tls(self, server: Server) -> None:
        claim = Handshake(SECRET, initiator=True, tls=True, binding=b"")
        with server.knock() as sock:
            sock.sendall(claim.start())
            claim.receive(recv_exact(sock, claim.wanted, Deadline.after(LONG)))
            assert sock.recv(1) == b""

    @pytest.mark.parametrize("data", [b"\x16", b"\x16\x03\x01\x02\x00" + bytes(512), b"\x16" * 99])
    def test_random_bytes(self, server: Server, files: Files, data: bytes) -> None:
        with server.knock() as sock:
            sock.sendall(data + os.urandom(200))
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert len(sock.recv(1 << 16, socket.MSG_WAITALL)) < 100  # an alert at most
        server.enter(files.tls())

    def test_slow_handshakes_keep_nobody_waiting(
        self, server: Server, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Some say nothing, some half a hello of TLS, some finish TLS and prove nothing."""
        for seconds in (10 * LONG, 0.5):
            monkeypatch.setattr(acceptor_module, "HANDSHAKE_SECONDS", seconds)
            self._enter_among_slow(server, files, dropped=seconds < LONG)

    def _enter_among_slow(self, server: Server, files: Files, *, dropped: bool) -> None:
        """Enter where they have all the time in the world; else see that they are dropped."""
        with contextlib.ExitStack() as stack:
            slow: list[socket.socket] = []
            for sent in (b"", b"\x16\x03\x01\x02\x00", b"\x16"):
                slow.append(stack.enter_context(server.knock()))
                slow[-1].sendall(sent)
            secure = stack.enter_context(files.tls().client(server.knock()))
            slow.append(secure)
            with contextlib.suppress(*([AuthenticationError, OSError] if dropped else [])):
                secure.handshake(Deadline.after(LONG))
            if not dropped:
                server.enter(files.tls())
                return
            for sock in slow:
                sock.settimeout(LONG)
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""

    def test_a_certificate_alone_cannot_stand_in_the_middle(
        self, server: Server, files: Files, authority: Authority
    ) -> None:
        """Somebody with a certificate of ours, and no secret, passes the proofs on."""
        middle = authority.issue("middle").tls()
        client_errors: list[BaseException] = []
        with sockets() as (client, at_middle), server.knock() as onward:

            def enter() -> None:
                with files.tls().client(client) as sock:
                    try:
                        authenticate(sock, SECRET, Deadline.after(LONG), initiator=True)
                    except AuthenticationError as error:
                        client_errors.append(error)

            def pass_on() -> None:
                with middle.server(at_middle) as near, middle.client(onward) as far:
                    for end in (near, far):
                        end.handshake(Deadline.after(LONG))
                    for source, target, size in ((near, far, 42), (far, near, 42), (near, far, 32)):
                        target.sendall(recv_exact(source, size, Deadline.after(LONG)))
                    far.settimeout(LONG)
                    assert far.recv(1) == b""

            run_threads([enter, pass_on])
        assert "another secret" in str(client_errors[0])


class TestSettings:
    def test_none_or_all(self, files: Files) -> None:
        assert tls_from_environment({}) is None
        assert tls_from_environment(dict.fromkeys(files.variables, "")) is None
        assert isinstance(tls_from_environment(files.variables), Tls)

    @pytest.mark.parametrize("missing", ["CERT", "KEY", "CA"])
    def test_some(self, files: Files, missing: str) -> None:
        name = f"MESHLIB_TLS_{missing}"
        some = {key: value for key, value in files.variables.items() if key != name}
        with pytest.raises(ValueError, match=f"^{name} not set: TLS needs all of"):
            tls_from_environment(some)

    @pytest.mark.parametrize("broken", ["CERT", "KEY", "CA"])
    def test_files_that_are_not_what_they_should_be(
        self, files: Files, broken: str, tmp_path: Path
    ) -> None:
        name = f"MESHLIB_TLS_{broken}"
        garbage = tmp_path / "garbage.pem"
        garbage.write_text("nothing of the kind")
        with pytest.raises(ValueError, match=f"{name}.*garbage.pem.*PEM"):
            tls_from_environment(files.variables | {name: str(garbage)})
        with pytest.raises(ValueError, match=f"{name}: cannot read .*absent.pem"):
            tls_from_environment(files.variables | {name: str(tmp_path / "absent.pem")})

    def test_a_key_of_another_certificate(self, files: Files, stranger: Files) -> None:
        with pytest.raises(ValueError, match="expected a certificate and its private key"):
            replace(files, key=stranger.key).tls()

    def test_a_key_with_a_password_is_refused_without_a_prompt(
        self, files: Files, tmp_path: Path
    ) -> None:
        from cryptography.hazmat.primitives import serialization

        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        locked = tmp_path / "locked.key"
        locked.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"password"),
            )
        )
        with pytest.raises(ValueError, match="without a password"):
            replace(files, key=locked).tls()

    def test_stores_look_into_the_environment(
        self, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in files.variables.items():
            monkeypatch.setenv(name, value)
        with TCPStore("127.0.0.1", 0, is_master=True, secret=SECRET, timeout=LONG) as master:
            with TCPStore("127.0.0.1", master.port, secret=SECRET, timeout=LONG) as client:
                client.set("key", b"value")
                with client.clone() as clone:
                    assert clone.get("key") == b"value"
            with pytest.raises(AuthenticationError, match="TLS"):
                TCPStore("127.0.0.1", master.port, secret=SECRET, timeout=LONG, tls=None)
        monkeypatch.delenv("MESHLIB_TLS_CA")
        with pytest.raises(ValueError, match="MESHLIB_TLS_CA not set"):
            TCPStore("127.0.0.1", 1, secret=SECRET)
        with pytest.raises(ValueError, match="MESHLIB_TLS_CA not set"):
            TCPStoreServer()


def test_what_goes_over_the_wire_is_encrypted() -> None:
    """A tap between two ranks sees none of what they say."""
    message = b"the quick brown fox jumps over the lazy dog " * 100
    seen = bytearray()
    tls = tls_of_the_tests()
    with sockets() as (client, tap_in), sockets() as (tap_out, server):

        def tap(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

        def write() -> None:
            with tls.client(client) as sock:
                authenticate(sock, SECRET, Deadline.after(LONG), initiator=True)
                sock.sendall(message)

        def read() -> None:
            with tls.server(server) as sock:
                authenticate(sock, SECRET, Deadline.after(LONG), initiator=False)
                assert recv_exact(sock, len(message), Deadline.after(LONG)) == message

        run_threads([write, read, lambda: tap(tap_in, tap_out), lambda: tap(tap_out, tap_in)])
    assert len(seen) > len(message)
    assert b"quick brown fox" not in seen
    assert b"meshlib" not in seen


def test_links_and_messages_of_a_group_are_inside_tls() -> None:
    def body(member: Member) -> None:
        member.meet()
        comm = member.comm
        assert isinstance(comm, TcpCommunicator)
        peer = 1 - member.rank
        assert isinstance(comm._links[peer].first, TlsSocket)
        assert all(isinstance(other.first, TlsSocket) for other in comm._messages.links)
        assert comm._links[peer].first.version() == "TLSv1.3"

    run_group(Transport("tls", TcpCommunicator, tls=True), 2, body)


def test_a_rank_without_tls_meets_one_with() -> None:
    """Both raise, and name TLS."""
    both = threading.Barrier(2, timeout=LONG)

    def make(membership: Any, table: Any) -> TcpCommunicator:
        membership.runtime.tls = tls_of_the_tests() if membership.rank == 0 else None
        return TcpCommunicator(membership, table)

    def body(member: Member) -> None:
        expected = (AuthenticationError, DistNetworkError, CommunicatorTimeoutError)
        with pytest.raises(expected) as caught:
            member.all_reduce(np.ones(4), ReduceOp.SUM, timeout=HANDSHAKE_SECONDS)
        assert "TLS" in str(caught.value)
        both.wait()

    run_group(Transport("mixed", make), 2, body)


def test_a_refused_certificate_is_logged(
    files: Files, impostor: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "meshlib.transport"), serving("rank", files.tls()) as server:
        with pytest.raises(AuthenticationError):
            server.enter(impostor)
        server.enter(files.tls())
    assert "TLS failed" in caplog.text
