"""Sockets with deadlines."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from transport._errors import DistNetworkError
from transport._net.sockets import (
    connect,
    format_address,
    listen,
    local_address_towards,
    recv_exact,
    send_all,
)
from transport._waiting.deadline import Deadline

SOON = 30.0


@pytest.mark.parametrize(
    ("host", "expected"),
    [(None, "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1")],
)
def test_listen_and_connect(host: str | None, expected: str) -> None:
    with listen(host) as listener:
        address, port = listener.getsockname()[:2]
        assert address == expected
        with connect(address, port, Deadline.after(SOON)) as one, listener.accept()[0] as other:
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            send_all(one, b"hello", Deadline.after(SOON))
            assert recv_exact(other, 5, Deadline.after(SOON)) == b"hello"


def test_all_interfaces_in_both_families() -> None:
    with listen("") as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            connect(host, port, Deadline.after(SOON)).close()


def test_a_port_in_use_names_host_and_port() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DistNetworkError, match=f"'127.0.0.1' port {port}.*EADDRINUSE"):
            listen("127.0.0.1", port)


def test_a_port_can_be_bound_again_at_once() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
        with connect("127.0.0.1", port, Deadline.after(SOON)), listener.accept()[0] as other:
            other.close()
    listen("127.0.0.1", port).close()


def test_hosts_and_ports_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="port must be from 0 to 65535, got 65536"):
        listen(None, 65536)
    with pytest.raises(DistNetworkError, match=r"192\.0\.2\.77.*EADDRNOTAVAIL"):
        listen("192.0.2.77")


def test_nobody_listens(free_port: int) -> None:
    begin = time.monotonic()
    with pytest.raises(
        DistNetworkError, match=rf"127.0.0.1:{free_port}: tried for \d+\.\d s.*REFUSED"
    ):
        connect("127.0.0.1", free_port, Deadline.after(0.15))
    assert time.monotonic() - begin > 0.14


def test_a_late_listener(free_port: int) -> None:
    listeners: list[socket.socket] = []
    timer = threading.Timer(0.1, lambda: listeners.append(listen("127.0.0.1", free_port)))
    timer.start()
    connect("127.0.0.1", free_port, Deadline.after(SOON)).close()
    timer.join()
    listeners[0].close()


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as listener, listen("::1") as silent:
        port = listener.getsockname()[1]
        dead_port = silent.getsockname()[1]
        silent.close()
        found = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", dead_port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with connect("both", port, Deadline.after(SOON)) as sock:
            assert sock.getpeername() == ("127.0.0.1", port)


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(DistNetworkError, match=r"nowhere:80.*cannot resolve nowhere \(Name or"):
        connect("nowhere", 80, Deadline.after(0.1))
    with pytest.raises(DistNetworkError, match=r"port.*: cannot resolve nowhere \(Name or"):
        listen("nowhere")


def test_a_connection_to_oneself_is_none(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """The kernel may give a connection the very port that it goes to, and connect it."""
    real = socket.socket.connect

    def bind_first(sock: socket.socket, address: tuple[str, int]) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        real(sock, address)

    monkeypatch.setattr(socket.socket, "connect", bind_first)
    with pytest.raises(DistNetworkError, match="ECONNREFUSED"):
        connect("127.0.0.1", free_port, Deadline.after(SOON), refusal_is_final=True)


def test_deadlines_of_sending_and_receiving() -> None:
    one, other = socket.socketpair()
    with one, other:
        with pytest.raises(TimeoutError):
            recv_exact(one, 1, Deadline.after(0.05))
        other.send(b"abc")
        assert recv_exact(one, 2, Deadline.after(SOON)) == b"ab"
        with pytest.raises(TimeoutError):
            recv_exact(one, 2, Deadline.after(0.05))
        with pytest.raises(TimeoutError):
            send_all(one, bytes(1 << 24), Deadline.after(0.05))
        with pytest.raises(TimeoutError, match="within 0 s"):
            send_all(other, b"x", Deadline.after(0))


def test_an_end_in_the_middle() -> None:
    one, other = socket.socketpair()
    with one:
        other.send(b"abc")
        other.close()
        with pytest.raises(ConnectionError, match="after 3 of 5 bytes"):
            recv_exact(one, 5, Deadline.after(SOON))


def test_local_addresses() -> None:
    assert local_address_towards("127.0.0.1", 80) == "127.0.0.1"
    assert local_address_towards("::1", 0) == "::1"


def test_addresses_for_people() -> None:
    assert format_address("::1", 80) == "[::1]:80"
    assert format_address("host", 80) == "host:80"


def test_forked_children_keep_no_copy() -> None:
    """Else a connection would outlive the process that it is of."""
    with listen() as listener:
        address = listener.getsockname()
        mine = connect(*address, Deadline.after(SOON))
        theirs, _ = listener.accept()
        child = os.fork()
        if child == 0:
            time.sleep(SOON)
            os._exit(0)
        try:
            mine.close()
            theirs.settimeout(SOON / 2)
            assert theirs.recv(1) == b""
        finally:
            theirs.close()
            os.kill(child, 9)
            os.waitpid(child, 0)
