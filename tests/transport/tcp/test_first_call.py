"""How many round trips the first call of a group takes: to the store, and to connect."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import transport._tcp.meeting.dial as dialling
from tests.support.transport.rank_threads import LONG, Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._errors import AuthenticationError
from transport._operands.reduce_op import ReduceOp
from transport._store import PrefixStore, Store
from transport._store.commands import Fields, Op
from transport._tcp import TcpCommunicator

HOSTS = 8


class CountingStore(PrefixStore):
    """Notes each question whose answer is waited for; what it has aside notes in the same place."""

    def __init__(self, prefix: str, store: Store, ops: list[Op]) -> None:
        super().__init__(prefix, store)
        self.ops = ops

    def _request(self, op: Op, fields: Fields) -> Fields:
        self.ops.append(op)
        return super()._request(op, fields)

    def _await(self, op: Op, fields: Fields, timeout: Any) -> Fields:
        self.ops.append(op)
        return super()._await(op, fields, timeout)

    def _post(self, op: Op, fields: Fields) -> None:
        super()._request(op, fields)

    def aside(self) -> CountingStore:
        return CountingStore(self.prefix, self.underlying_store.aside(), self.ops)


class CountingSocket(socket.socket):
    """Counts how often something is received after something was sent."""

    sent = False
    turns = 0

    def send(self, *arguments: Any) -> int:
        self.sent = True
        return super().send(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self.turns += self.sent
        self.sent = False
        return super().recv_into(*arguments)


def counting(
    make: Callable[[Membership, Thresholds], Communicator], ops: dict[int, list[Op]]
) -> Transport:
    def counted(membership: Membership, table: Thresholds) -> Communicator:
        own = ops[membership.rank] = []
        store = CountingStore("counted", membership.store, own)
        return make(replace(membership, store=store), table)

    return Transport("counted", counted)


@pytest.fixture(autouse=True)
def nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a connection for long asks the store once more."""
    monkeypatch.setattr("transport._tcp.communicator._FIRST_WAIT_SECONDS", LONG)
    monkeypatch.setattr("transport._communicators.store_waits._FIRST_WAIT_SECONDS", LONG)


def test_one_request_reads_all_addresses() -> None:
    ops: dict[int, list[Op]] = {}
    here = threading.Barrier(HOSTS)

    def body(member: Member) -> None:
        here.wait(LONG)
        member.comm.all_to_all(member.call(Kind.ALL_TO_ALL), *_parts())
        member.all_reduce(np.ones(2), ReduceOp.SUM)

    run_group(counting(TcpCommunicator, ops), HOSTS, body)
    assert ops == {rank: [Op.MULTI_GET] if rank else [] for rank in range(HOSTS)}


def test_connections_take_three_round_trips_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP's own, one for fresh bytes, one for the proofs and what the connection is for."""
    turns: list[int] = []
    together = {rank: threading.Barrier(rank) for rank in range(1, HOSTS)}
    connect, dial = dialling.connect, TcpCommunicator._dial

    def counted(*arguments: Any, **named: Any) -> socket.socket:
        return CountingSocket(fileno=connect(*arguments, **named).detach())

    def side_by_side(comm: TcpCommunicator, *arguments: Any) -> tuple[socket.socket, int]:
        together[comm.rank].wait(LONG)  # passed when all of this rank's have begun
        sock, connections = dial(comm, *arguments)
        assert isinstance(sock, CountingSocket)
        turns.append(sock.turns)
        return sock, connections

    monkeypatch.setattr(dialling, "connect", counted)
    monkeypatch.setattr(TcpCommunicator, "_dial", side_by_side)

    def body(member: Member) -> None:
        member.comm.all_to_all(member.call(Kind.ALL_TO_ALL), *_parts())

    run_group(counting(TcpCommunicator, {}), HOSTS, body)
    assert turns == [2] * (HOSTS * (HOSTS - 1) // 2)


def _parts() -> tuple[list[Any], list[Any]]:
    return [np.zeros(1) for _ in range(HOSTS)], [np.ones(1) for _ in range(HOSTS)]


def test_who_hangs_up_in_the_handshake_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed then hangs up as one does that refuses our proof."""
    attempts: list[int] = []
    authenticate = dialling.authenticate

    def hung_up_on(*arguments: Any, **named: Any) -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            error = AuthenticationError("refused", refused=True)
            raise error from ConnectionResetError("hung up")
        authenticate(*arguments, **named)

    monkeypatch.setattr(dialling, "authenticate", hung_up_on)

    def body(member: Member) -> None:
        member.all_reduce(np.ones(2), ReduceOp.SUM)

    run_group(counting(TcpCommunicator, {}), 2, body)
    assert attempts == [0, 1]
