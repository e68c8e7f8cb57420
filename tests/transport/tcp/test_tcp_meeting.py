"""How members find and reach each other over TCP, and what ends the wait for one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.net.tcp_members import (
    SECRET,
    all_reduce,
    enter,
    forge_address,
    member_of,
    ones,
)
from tests.support.transport.rank_threads import LONG, Member, run_threads
from transport._errors import (
    AuthenticationError,
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistNetworkError,
    PeerLostError,
)
from transport._net.auth import authenticate
from transport._store.hash_store import HashStore
from transport._store.tcp.store import TCPStore
from transport._tcp.meeting.address import Address
from transport._tcp.meeting.hello import TrafficKind
from transport._waiting.deadline import Deadline

# Where ranks find each other.


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", None])
@pytest.mark.parametrize("secret", [SECRET, None])
def test_members_meet_at_any_loopback(
    store: HashStore, host: str | None, secret: bytes | None
) -> None:
    def body(rank: int) -> None:
        with member_of(store, rank, secret=secret, host=host) as member:
            assert (all_reduce(member) == 2).all()
            if rank == 0:
                member.send(ones(), 1)
            else:
                assert member.recv(ones(), 0) == 0
            member.barrier()

    run_threads([lambda: body(0), lambda: body(1)])


@pytest.mark.parametrize("secret", [SECRET, None])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_store_determines_the_interface_to_listen_on(secret: bytes | None, host: str) -> None:
    master = TCPStore(host, 0, is_master=True, secret=secret)

    def body(rank: int) -> None:
        with (
            TCPStore(host, master.port, secret=secret) as client,
            member_of(client, rank, secret=secret, host=None) as member,
        ):
            published = Address.decode(client.get(f"g/tcp/{rank}"))
            assert published.host == host
            assert (all_reduce(member) == 2).all()

    run_threads([lambda: body(0), lambda: body(1)])
    master.close()


def test_the_loopback_of_another_machine_is_not_tried(store: HashStore) -> None:
    forge_address(store, 0, 1, machine="somewhere else")
    with (
        member_of(store, 1, (7, 9)) as member,
        pytest.raises(DistNetworkError, match=r"rank 7 .*loopback only.*MESHLIB_SECRET"),
    ):
        member.barrier()


def test_garbage_in_place_of_an_address_is_named(store: HashStore) -> None:
    store.set("g/tcp/0", b"garbage")
    with member_of(store, 1) as member, pytest.raises(DistNetworkError, match="garbage"):
        member.barrier()


def test_a_member_with_another_secret_gets_that_error(store: HashStore) -> None:
    with (
        member_of(store, 0, secret=b"another"),
        member_of(store, 1) as member,
        pytest.raises(AuthenticationError, match="another secret"),
    ):
        member.barrier()


def test_a_member_whose_process_is_gone_refuses(store: HashStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    forge_address(store, 0, port)
    with member_of(store, 1) as member:
        for wait in (
            member.barrier,
            lambda: member.send(ones(), 0),
            lambda: member.recv(ones(), 0),
        ):
            with pytest.raises(PeerLostError, match="rank 0") as lost:
                wait()
            assert lost.value.peer == 0


# Waits before there is a connection: each ends at its deadline, and by abort.


@contextlib.contextmanager
def _absent(store: HashStore) -> Iterator[None]:
    """Rank 0 never enters."""
    yield


@contextlib.contextmanager
def _unreachable(store: HashStore) -> Iterator[None]:
    """Packets to rank 0 are dropped: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        time.sleep(0.05)
        forge_address(store, 0, listener.getsockname()[1])
        yield


@contextlib.contextmanager
def _silent(store: HashStore) -> Iterator[None]:
    """Rank 0 is stopped: its kernel accepts, nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        forge_address(store, 0, listener.getsockname()[1])
        yield


@contextlib.contextmanager
def _unwelcoming(store: HashStore) -> Iterator[None]:
    """Rank 0 proves itself, and does not go on."""

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(AuthenticationError, OSError):  # the other may give up
            authenticate(sock, SECRET, Deadline.after(LONG), initiator=False)
            sock.settimeout(LONG)
            while sock.recv(100):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        forge_address(store, 0, listener.getsockname()[1])
        yield
        thread.join(LONG)


OBSTACLES = [_absent, _unreachable, _silent, _unwelcoming]
WAITS: list[Callable[[Member, float], None]] = [
    lambda member, seconds: member.barrier(seconds),
    lambda member, seconds: member.send(ones(), 0, timeout=seconds),
    lambda member, seconds: member.recv(ones(), 0, timeout=seconds) and None,
]
WAIT_NAMES = ["barrier", "send", "recv"]


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("wait", WAITS, ids=WAIT_NAMES)
def test_a_deadline_ends_connecting(
    store: HashStore, obstacle: Any, wait: Callable[[Member, float], None]
) -> None:
    with obstacle(store), member_of(store, 1, (5, 6)) as member:
        with pytest.raises(CommunicatorTimeoutError, match="rank 5") as late:
            wait(member, 0.3)
        assert late.value.peer == 0


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("wait", WAITS, ids=WAIT_NAMES)
def test_abort_ends_connecting(
    store: HashStore, obstacle: Any, wait: Callable[[Member, float], None]
) -> None:
    with obstacle(store), member_of(store, 1) as member:
        timer = threading.Timer(0.3, member.comm.abort, ["never mind"])
        timer.start()
        with pytest.raises(CommunicatorAbortedError, match="never mind"):
            wait(member, LONG)
        timer.join()


@pytest.mark.parametrize(
    ("obstacle", "where"),
    [(_silent, "transport._net.auth"), (_unwelcoming, "transport._tcp.meeting.dial")],
)
@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_a_member_to_whom_the_way_breaks_is_out_of_reach(
    store: HashStore,
    monkeypatch: pytest.MonkeyPatch,
    obstacle: Any,
    where: str,
    number: int,
) -> None:
    """In the middle of the handshake, and behind it: as for one that was connected."""

    def give_up(*_: Any) -> bytes:
        raise OSError(number, os.strerror(number))

    with obstacle(store), member_of(store, 1) as member:
        monkeypatch.setattr(f"{where}.recv_exact", give_up)
        with pytest.raises(PeerLostError, match="rank 0 is out of reach") as lost:
            member.barrier()
        monkeypatch.undo()
        assert lost.value.peer == 0
        assert lost.value.unreachable


def test_abort_ends_the_wait_for_a_member_that_is_to_connect(store: HashStore) -> None:
    with member_of(store, 0) as member, member_of(store, 1):
        timer = threading.Timer(0.5, member.comm.abort, ["never mind"])
        timer.start()
        with pytest.raises(CommunicatorAbortedError, match="never mind"):
            member.barrier()
        timer.join()


def test_a_peer_that_gave_up_connecting_may_try_again(store: HashStore) -> None:
    """Its first connection is there already, unused, when the second comes."""
    with member_of(store, 0) as member, member_of(store, 1) as peer:
        stale = enter(store, 0, 1, TrafficKind.COLLECTIVE)
        run_threads([lambda: (time.sleep(0.1), all_reduce(member)), lambda: all_reduce(peer)])
        stale.close()
