"""The store's server: wills of clients that die, and clients of every kind."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from transport._errors import (
    StoreTimeoutError,
)
from transport._net.auth import authenticate
from transport._net.sockets import connect as connect_socket
from transport._store import TCPStore, TCPStoreServer
from transport._store.commands import Op
from transport._store.tcp.client import _StoreRequest
from transport._store.tcp.wire import pack_request
from transport._waiting.deadline import Deadline

Connect = Callable[[], TCPStore]
SOON = 30.0


def raw(server: TCPStoreServer) -> socket.socket:
    """Return an authenticated connection that speaks for itself."""
    sock = connect_socket(*server.address, Deadline.after(SOON))
    authenticate(sock, b"s", Deadline.after(SOON), initiator=True)
    sock.settimeout(SOON)
    return sock


def is_dropped(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionError:
        return True


class TestWills:
    @pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(3)", "1 / 0"])
    def test_appended_when_the_client_dies(self, connect: Connect, end: str) -> None:
        store = connect()
        store.set("log", "begin;")
        code = f"""
import os, sys
from transport._store import TCPStore
store = TCPStore("127.0.0.1", {store.port}, timeout=60, secret=b"s")
assert store.set_will("log", "first will")
assert store.set_will("log", "dead")
child = os.fork()  # a child that lives on must not hide its parent's end
if child == 0:
    import time
    time.sleep(60)
    os._exit(0)
store.set("armed", str(child))
store.get("go")
{end}
"""
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        child = int(store.get("armed"))
        store.set("go", "")
        assert store.tail("log", 6, timeout=SOON) == b"dead"
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        process.wait(SOON)

    def test_not_after_a_goodbye(self, connect: Connect) -> None:
        store, other = connect(), connect()
        assert other.set_will("log", "dead")
        other.close()
        with pytest.raises(StoreTimeoutError):
            store.tail("log", 0, timeout=0.1)

    def test_of_a_client_that_owed_reading(self, server: TCPStoreServer, connect: Connect) -> None:
        """A goodbye counts even where the client went before it read its answers."""
        store, sock = connect(), raw(server)
        sock.sendall(pack_request(1, Op.SET_WILL, 0.0, [b"log", b"dead"]))
        sock.sendall(b"".join(pack_request(i, Op.NUM_KEYS, 1.0, []) for i in range(2, 9)))
        sock.sendall(pack_request(9, Op.GOODBYE, 0.0, []))
        sock.close()
        with pytest.raises(StoreTimeoutError):
            store.tail("log", 0, timeout=0.2)

    def test_a_goodbye_arrives_although_answers_were_not_read(self, connect: Connect) -> None:
        store, other = connect(), connect()
        other.set_will("log", "dead")
        store.set("big", bytes(4 << 20))
        connection = other._connection
        for number in range(8):
            request = pack_request(100 + number, Op.GET, SOON, [b"big"])
            connection._send(100 + number, _StoreRequest(), request, SOON)
        other.close()
        with pytest.raises(StoreTimeoutError):
            store.tail("log", 0, timeout=0.2)


class TestServer:
    def test_a_write_ends_a_wait(self, server: TCPStoreServer, connect: Connect) -> None:
        store, other = connect(), connect()
        with ThreadPoolExecutor(1) as pool:
            for i in range(20):
                wait = pool.submit(store.get, f"k{i}")
                time.sleep(0.005)  # most likely the server has the request by now
                other.set(f"k{i}", str(i))
                assert wait.result(SOON) == str(i).encode()

    def test_ten_thousand_keys(self, connect: Connect) -> None:
        store, other = connect(), connect()
        keys = [f"key/{i}" for i in range(10_000)]
        with ThreadPoolExecutor(1) as pool:
            values = pool.submit(other.multi_get, keys)
            for begin in range(0, 10_000, 1000):
                part = keys[begin : begin + 1000]
                store.multi_set(part, part)
            assert values.result(SOON) == [key.encode() for key in keys]
        assert store.num_keys() == 10_000
        with pytest.raises(StoreTimeoutError, match="and 9992 more"):
            store.wait([f"gone/{i}" for i in range(10_000)], 0.01)

    def test_256_clients(self, connect: Connect) -> None:
        with ThreadPoolExecutor(32) as pool:
            stores = list(pool.map(lambda _: connect(), range(256)))
            assert sorted(pool.map(lambda s: s.add("n", 1), stores)) == list(range(1, 257))
            waits = [pool.submit(store.get, "late") for store in stores[:31]]
            stores[255].set("late", "v")
            assert {wait.result(SOON) for wait in waits} == {b"v"}

    @pytest.mark.parametrize(
        "data",
        [
            struct.pack("<Q", 1 << 60) + bytes(100),
            b"\xff" * 100,
            bytes(100),
            pack_request(1, 200, 1.0, [b"k"]),
            pack_request(1, Op.GET, math.nan, [b"k"]),
            pack_request(1, Op.GET, -1.0, [b"k"]),
            pack_request(1, Op.SET, 1.0, [b"k"]),
            pack_request(1, Op.ADD, 1.0, [b"k", b"one"]),
            pack_request(1, Op.TAIL, 1.0, [b"k", b"123"]),
            pack_request(1, Op.MULTI_SET, 1.0, [b"k", b"v", b"k"]),
            pack_request(1, Op.CANCEL, 1.0, []),
            pack_request(1, Op.GET, 1.0, [b"k"])[:-5] + struct.pack("<I", 1 << 31) + b"k",
            pack_request(1, Op.GET, 9.0, [b"k"]) * 2,
        ],
    )
    def test_garbage_ends_its_own_connection_only(
        self, server: TCPStoreServer, connect: Connect, data: bytes
    ) -> None:
        store = connect()
        with ThreadPoolExecutor(1) as pool, raw(server) as sock:
            wait = pool.submit(store.get, "late")
            sock.sendall(data)
            assert is_dropped(sock)
            store.set("late", "v")
            assert wait.result(SOON) == b"v"

    def test_an_announced_gigabyte_is_not_allocated(
        self, server: TCPStoreServer, connect: Connect
    ) -> None:
        store = connect()
        socks = [raw(server) for _ in range(16)]
        before = _resident_bytes()
        for sock in socks:
            sock.sendall(struct.pack("<I", 1 << 30) + bytes(1000))
        store.set("k", "v")
        assert _resident_bytes() - before < 1 << 28
        for sock in socks:
            sock.close()
        assert store.get("k") == b"v"

    def test_frames_in_pieces_and_at_once(self, server: TCPStoreServer, connect: Connect) -> None:
        store = connect()
        requests = b"".join(
            pack_request(i, Op.APPEND, 1.0, [b"log", str(i % 10).encode()]) for i in range(30)
        )
        with raw(server) as sock:
            for begin in range(0, 200, 7):
                sock.sendall(requests[begin : begin + 7])
                time.sleep(0.001)
            sock.sendall(requests[203:])
            text = b""
            while len(text) < 30:
                text += store.tail("log", len(text))
        assert text == b"0123456789" * 3

    def test_a_client_that_does_not_read(self, server: TCPStoreServer, connect: Connect) -> None:
        store = connect()
        store.set("big", bytes(2 << 20))
        with raw(server) as sock:
            with contextlib.suppress(TimeoutError):
                sock.settimeout(0.3)
                for i in range(64):
                    sock.sendall(pack_request(i, Op.GET, 1.0, [b"big"]))
            store.set("k", "v")
            assert store.get("k") == b"v"

    def test_waits_that_are_over_are_forgotten(
        self, server: TCPStoreServer, connect: Connect
    ) -> None:
        store, other = connect(), connect()
        with ThreadPoolExecutor(1) as pool:
            for i in range(300):
                wait = pool.submit(store.get, f"k{i}", 1000.0)
                while not server._commands.table._waiting_for_value and not wait.done():
                    time.sleep(0.0002)
                other.set(f"k{i}", "")
                wait.result(SOON)
        assert len(server._timers) < 100
        assert server._parked == 0

    def test_nothing_is_left(self) -> None:
        threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
        for _ in range(3):
            server = TCPStoreServer()
            store = TCPStore(*server.address, timeout=SOON)
            store.set("k", "v")
            store.close()
            server.close()
            server.close()
        assert not set(threading.enumerate()) - threads
        assert set(os.listdir("/proc/self/fd")) <= files

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        data=st.lists(
            st.binary(max_size=64)
            | st.builds(
                pack_request,
                st.integers(0, 3),
                st.sampled_from([op for op in Op if op != Op.SET_WILL]),
                st.floats(0, 0.01),
                st.lists(st.binary(max_size=9), max_size=4),
            ),
            max_size=8,
        ).map(b"".join)
    )
    @example(data=b"\x0d\x00\x00\x00" * 5)
    def test_any_bytes(self, server: TCPStoreServer, connect: Connect, data: bytes) -> None:
        store = TCPStore(*server.address, timeout=SOON, secret=b"s")
        with raw(server) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while True:
                try:
                    if not sock.recv(1 << 16):
                        break
                except ConnectionError:
                    break
        store.set("alive", "yes")
        assert store.get("alive") == b"yes"
        store.close()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
