"""A thread that stays with the connection that alone brings requests keeps nobody waiting."""

import threading
import time

import pytest
from rpc_workers import workers

from meshlib import rpc
from meshlib.rpc.wire.connection import Connection

gate, begun = threading.Event(), threading.Event()


@pytest.fixture
def stays(monkeypatch):
    """The times that a thread has stayed with a connection."""
    gate.clear()
    begun.clear()
    counted, stay = [], Connection.stay

    def staying(self):
        counted.append(self.peer)
        stay(self)

    monkeypatch.setattr(Connection, "stay", staying)
    yield counted
    gate.set()


def wait_for_gate():
    begun.set()
    return gate.wait(60)


def open_gate():
    gate.set()


def call(to, function):
    return rpc.rpc_sync(to, function)


def until_it_stays(stays):
    del stays[:]
    until = time.monotonic() + 60
    while not stays and time.monotonic() < until:
        rpc.rpc_sync(1, int)
    assert stays


@pytest.mark.parametrize("threads", [1, 4])
def test_other_callers_are_served(stays, threads):
    def program():
        for _ in range(5):
            until_it_stays(stays)
            assert rpc.rpc_sync(2, call, (1, int)) == 0

    workers(3, program, threads=threads)


def test_a_long_call_does_not_stop_the_next_on_its_connection(stays):
    def program():
        until_it_stays(stays)
        long = rpc.rpc_async(1, wait_for_gate)
        assert begun.wait(60)
        assert rpc.rpc_sync(1, open_gate) is None
        assert long.wait()

    workers(2, program)


def test_calls_nest_from_where_a_thread_stays(stays):
    def program():
        for _ in range(5):
            until_it_stays(stays)
            assert rpc.rpc_sync(1, call, (0, int)) == 0

    workers(2, program, threads=1)
