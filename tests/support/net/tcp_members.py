"""Members of groups over TCP, for tests, and addresses in their names."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.transport.rank_threads import LONG, Member
from transport._communicators.runtime import Membership, Runtime
from transport._net.auth import authenticate
from transport._operands.reduce_op import ReduceOp
from transport._place import this_machine
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore
from transport._tcp import TcpCommunicator
from transport._tcp.meeting.address import Address
from transport._tcp.meeting.hello import WELCOME, Hello, TrafficKind, digest_of
from transport._waiting.deadline import Deadline

SECRET = b"secret of the tests"


@contextlib.contextmanager
def member_of(
    store: Store,
    rank: int,
    ranks: tuple[int, ...] = (0, 1),
    group: str = "g",
    secret: bytes | None = SECRET,
    host: str | None = "127.0.0.1",
) -> Iterator[Member]:
    runtime = Runtime(secret, host)
    comm = TcpCommunicator(Membership(group, rank, ranks, PrefixStore(group, store), runtime))
    try:
        yield Member(comm)
    finally:
        comm.close()
        runtime.close()


def forge_address(store: Store, rank: int, port: int, **changes: Any) -> None:
    """Publish an address in the name of a member."""
    fields = {"host": "127.0.0.1", "port": port, "token": "ab" * 16, "machine": this_machine()}
    store.set(f"g/tcp/{rank}", Address(**{**fields, **changes}).encode())


def ones(count: int = 4) -> Any:
    return np.ones(count, np.float32)


def all_reduce(member: Member, timeout: float = LONG) -> Any:
    buffer = ones()
    member.all_reduce(buffer, ReduceOp.SUM, timeout)
    return buffer


def enter(store: Store, dst: int, src: int, channel: TrafficKind) -> socket.socket:
    """Connect to member ``dst`` in the name of ``src``, which must know the secret."""
    address = Address.decode(store.get(f"g/tcp/{dst}"))
    sock = socket.create_connection((address.host, address.port), LONG)
    try:
        authenticate(sock, SECRET, Deadline.after(LONG), initiator=True)
        sock.sendall(Hello(bytes.fromhex(address.token), digest_of("g"), src, channel).pack())
        sock.settimeout(LONG)
        assert sock.recv(1) == WELCOME
    except BaseException:
        sock.close()
        raise
    return sock
