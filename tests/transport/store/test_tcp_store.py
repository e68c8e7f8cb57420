"""The store over TCP: making one, secrets, the connection."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from tests.support.net.certificates import tls_of_the_tests
from tests.support.net.resets import await_end, reset
from tests.support.transport.growing import with_growing_deadlines
from transport._errors import (
    AuthenticationError,
    DistNetworkError,
    DistStoreError,
    StoreTimeoutError,
)
from transport._net.auth import Handshake, authenticate
from transport._net.sockets import listen, recv_exact
from transport._net.tls import Tls, TlsSocket
from transport._store import TCPStore, TCPStoreServer
from transport._store.tcp.serving import listen_host
from transport._waiting.deadline import Deadline

Connect = Callable[[], TCPStore]
SOON = 30.0
FORKS = (Path(__file__).parent / "programs" / "fork_of_a_store.py").read_text()


class TestMaking:
    def test_a_master_and_its_clients(self) -> None:
        with (
            TCPStore("localhost", 0, None, True, timeout=SOON) as master,
            TCPStore("localhost", master.port, timeout=SOON) as client,
        ):
            client.set("k", "v")
            assert master.get("k") == b"v"
            assert (master.host, client.port) == ("localhost", master.port)
            assert master.describe() == f"TCPStore(localhost:{master.port})"

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    def test_both_families(self, host: str) -> None:
        with (
            TCPStore(host, 0, is_master=True, timeout=SOON) as master,
            TCPStore(host, master.port, timeout=SOON) as client,
        ):
            assert client.add("n", 1) == 1

    def test_clients_may_connect_first(self, free_port: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(TCPStore, "127.0.0.1", free_port, timeout=SOON)
            time.sleep(0.1)
            with (
                TCPStore("127.0.0.1", free_port, is_master=True, timeout=SOON) as master,
                early.result(SOON) as client,
            ):
                client.set("k", "v")
                assert master.get("k") == b"v"

    def test_the_master_waits_for_workers(self, free_port: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            master = pool.submit(TCPStore, "127.0.0.1", free_port, 3, True, SOON)
            clients = [TCPStore("127.0.0.1", free_port, 3, timeout=SOON)]
            time.sleep(0.05)
            assert not master.done()
            clients.append(TCPStore("127.0.0.1", free_port, 3, timeout=SOON))
            assert master.result(SOON).num_keys() == 0
            for store in (*clients, master.result()):
                store.close()

    def test_missing_workers(self) -> None:
        def attempt(seconds: float) -> bool | None:
            try:
                TCPStore("127.0.0.1", 0, 2, True, timeout=seconds)
            except AuthenticationError:  # it has not come so far
                return None
            except StoreTimeoutError as error:
                return "1 of 2 have connected" in str(error)
            return False

        assert with_growing_deadlines(attempt)
        TCPStore("127.0.0.1", 0, 2, True, timeout=SOON, wait_for_workers=False).close()

    def test_a_port_in_use(self) -> None:
        with listen() as taken:
            port = taken.getsockname()[1]
            with pytest.raises(DistNetworkError, match=f"'127.0.0.1' port {port}.*EADDRINUSE"):
                TCPStore("127.0.0.1", port, is_master=True)

    def test_nobody_serves(self, free_port: int) -> None:
        with pytest.raises(DistNetworkError, match=rf"127.0.0.1:{free_port}.*ECONNREFUSED"):
            TCPStore("127.0.0.1", free_port, timeout=0.1)

    def test_tenants_share_a_server(self) -> None:
        with TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, timeout=SOON) as first:
            second = TCPStore(
                "127.0.0.1", first.port, is_master=True, multi_tenant=True, timeout=SOON
            )
            first.set("k", "v")
            assert second.get("k") == b"v"
            with pytest.raises(ValueError, match="secret differs"):
                TCPStore(
                    "127.0.0.1", first.port, is_master=True, multi_tenant=True, secret=b"other"
                )
            first.close()
            assert second.get("k") == b"v"
            second.close()
            with pytest.raises(DistNetworkError):
                TCPStore("127.0.0.1", first.port, timeout=0.05)

    def test_master_listen_fd(self) -> None:
        listener = listen()
        port = listener.getsockname()[1]
        with TCPStore(
            "127.0.0.1", 0, is_master=True, master_listen_fd=listener.detach(), timeout=SOON
        ) as master:
            assert master.port == port
            master.set("k", "v")

    def test_wrong_listen_fd(self) -> None:
        read, write = os.pipe()
        with pytest.raises(DistNetworkError, match=f"master_listen_fd {read}"):
            TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=read)
        os.close(read)
        os.close(write)
        idle = socket.socket()
        with pytest.raises(DistNetworkError, match="must be a listening socket"):
            TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=idle.detach())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("", 1), "host_name must be"),
            (("h", 70000), "port must be from 0 to 65535, got 70000"),
            (("h", 0), "port must be the master's"),
            (("h", 1, 0), "world_size must be at least 1 or None, got 0"),
            (("h", 1, None, False, 1.0, True, False, 3), "master_listen_fd is for the master"),
            (("h", "1"), "port must be a whole number, got '1' of type str"),
            (("h", 1, 2.0), "world_size must be a whole number, got 2.0"),
        ],
    )
    def test_wrong_arguments(self, arguments: tuple[object, ...], message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            TCPStore(*arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("host", "secret", "expected"),
        [
            ("10.0.0.1", b"s", "10.0.0.1"),
            ("fe80::1%eth0", b"s", "fe80::1%eth0"),
            ("localhost", b"s", "localhost"),
            ("node-1", b"s", ""),
            ("node-1", None, "node-1"),
        ],
    )
    def test_where_a_master_listens(self, host: str, secret: bytes | None, expected: str) -> None:
        assert listen_host(host, secret) == expected

    def test_without_a_secret_only_the_loopback_is_served(self) -> None:
        with contextlib.closing(TCPStoreServer()) as server:
            assert server.host == "127.0.0.1"
        with contextlib.closing(TCPStoreServer(secret=b"s")) as server:
            assert server.host in ("::", "0.0.0.0")


class TestSecrets:
    @pytest.mark.parametrize(
        ("secret", "message"),
        [(b"wrong", "another secret"), (None, "the other end has a secret and this end has none")],
    )
    def test_strangers_are_refused(
        self, server: TCPStoreServer, connect: Connect, secret: bytes | None, message: str
    ) -> None:
        friend = connect()
        with pytest.raises(AuthenticationError, match=message):
            TCPStore(*server.address, timeout=SOON, secret=secret)
        friend.set("k", "v")

    def test_the_environments_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MESHLIB_SECRET", b"s".hex())
        with (
            TCPStore("127.0.0.1", 0, is_master=True, timeout=SOON) as master,
            TCPStore("127.0.0.1", master.port, timeout=SOON, secret=b"s"),
            pytest.raises(AuthenticationError),
        ):
            TCPStore("127.0.0.1", master.port, timeout=SOON, secret=None)
        monkeypatch.setenv("MESHLIB_SECRET", "not hexadecimal")
        with pytest.raises(ValueError, match="must be hexadecimal") as caught:
            TCPStore("127.0.0.1", 1)
        assert "not hex" not in str(caught.value)


class TestConnection:
    def test_many_threads_on_one_client(self, connect: Connect) -> None:
        store, other = connect(), connect()

        def work(number: int) -> int:
            for i in range(40):
                store.set(f"{number}/{i}", str(i))
                assert store.get(f"{number}/{i}") == str(i).encode()
                store.add("n", 1)
            return int(store.get(f"go {number}"))

        with ThreadPoolExecutor(8) as pool:
            results = [pool.submit(work, number) for number in range(8)]
            other.wait([f"{number}/39" for number in range(8)])
            other.multi_set([f"go {number}" for number in range(8)], list("01234567"))
            assert [result.result(SOON) for result in results] == list(range(8))
        assert store.add("n", 0) == 320
        assert not store._connection._expected

    def test_the_server_closes(self, server: TCPStoreServer, connect: Connect) -> None:
        store = connect()
        with ThreadPoolExecutor(1) as pool:
            wait = pool.submit(store.get, "never")
            time.sleep(0.05)
            server.close()
            with pytest.raises(DistStoreError, match=r"TCPStore\(127.0.0.1:.*connection is lost"):
                wait.result(SOON)
        with pytest.raises(DistStoreError, match="connection is lost"):
            store.set("k", "v")

    def test_a_server_that_answers_garbage(self) -> None:
        with listen() as listener, ThreadPoolExecutor(1) as pool:

            def serve() -> None:
                sock, _ = listener.accept()
                with sock:
                    authenticate(sock, None, Deadline.after(SOON), initiator=False)
                    sock.recv(1000)
                    sock.sendall(b"\xff" * 64)
                    sock.recv(1000)

            done = pool.submit(serve)
            with (
                TCPStore(*listener.getsockname(), timeout=SOON, secret=None) as store,
                pytest.raises(DistStoreError, match="invalid reply"),
            ):
                store.get("k")
            done.result(SOON)

    def test_a_server_that_closes_in_the_handshake_is_not_taken_for_one_that_refuses(self) -> None:
        with listen() as listener, ThreadPoolExecutor(1) as pool:
            listener.settimeout(SOON)

            def serve() -> None:
                sock, _ = listener.accept()
                with sock:
                    handshake, deadline = Handshake(b"s", initiator=False), Deadline.after(SOON)
                    sock.sendall(handshake.receive(recv_exact(sock, handshake.wanted, deadline)))
                    recv_exact(sock, handshake.wanted, deadline)
                sock, _ = listener.accept()
                with sock:
                    authenticate(sock, b"s", Deadline.after(SOON), initiator=False)
                    sock.recv(1000)

            done = pool.submit(serve)
            TCPStore(*listener.getsockname(), timeout=SOON, secret=b"s").close()
            done.result(SOON)

    def test_a_server_that_hangs_up_before_tls_begins_is_tried_again(self) -> None:
        """As one does that closes with connections in its queue; another one follows."""
        tls, listener = tls_of_the_tests(), listen()
        servers: list[TCPStoreServer] = []

        class Late:
            """Begins TLS the first time when the connection is lost."""

            def client(self, sock: socket.socket) -> TlsSocket:
                if not servers:
                    reset(listener.accept()[0])
                    await_end(sock)
                    servers.append(TCPStoreServer(secret=b"s", listener=listener, tls=tls))
                return tls.client(sock)

        late = cast(Tls, Late())
        with TCPStore(*listener.getsockname(), timeout=SOON, secret=b"s", tls=late) as store:
            store.set("k", "v")
        servers[0].close()

    def test_a_silent_stranger_that_accepts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Its time is the handshake's, not the store's.
        monkeypatch.setattr("transport._store.tcp.store.HANDSHAKE_SECONDS", 0.1)
        with listen() as listener:
            host, port = listener.getsockname()
            with pytest.raises(AuthenticationError, match=r"sent nothing for 0\.1 s") as caught:
                TCPStore(host, port, timeout=SOON, secret=b"s")
        assert "It accepted the connection: perhaps a program other" in str(caught.value)
        assert f"{host}:{port}" in str(caught.value)
        assert not caught.value.refused

    def test_a_silent_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transport._store.tcp.client.GRACE_SECONDS", 0.1)
        with listen() as listener, ThreadPoolExecutor(1) as pool:

            def serve() -> None:
                sock, _ = listener.accept()
                with sock:
                    authenticate(sock, None, Deadline.after(SOON), initiator=False)
                    while sock.recv(1000):
                        pass

            done = pool.submit(serve)
            with (
                TCPStore(*listener.getsockname(), timeout=SOON, secret=None) as store,
                ThreadPoolExecutor(2) as waiters,
            ):
                store.set_timeout(0.1)
                for wait in [waiters.submit(store.get, "k") for _ in range(2)]:
                    with pytest.raises(DistStoreError, match="did not answer"):
                        wait.result(SOON)
            done.result(SOON)

    def test_a_fork_cannot_use_its_parents_store(
        self, server: TCPStoreServer, connect: Connect
    ) -> None:
        """Nor say goodbye for it."""
        process = subprocess.Popen([sys.executable, "-c", FORKS, *map(str, server.address)])
        store = connect()
        assert b"DistStoreError" in store.get("child")
        assert b"cannot be used in its fork" in store.get("child")
        assert store.get("alive") == b"yes"
        assert not store.check(["will"])
        store.set("go", "")
        assert process.wait(SOON) == 0
        with pytest.raises(StoreTimeoutError):
            store.get("will", timeout=0.1)

    def test_too_long_a_value(self, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transport._store.tcp.wire.MAX_FRAME", 1000)
        store = connect()
        with pytest.raises(ValueError, match="too long; at most 1000"):
            store.set("k", bytes(2000))
        store.set("k", bytes(500))

    def test_an_unclosed_store_warns(self, server: TCPStoreServer) -> None:
        store = TCPStore(*server.address, timeout=SOON, secret=b"s")
        with pytest.warns(ResourceWarning, match="unclosed TCPStore"):
            del store
