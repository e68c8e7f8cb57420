"""Many calls at once: their order, their replies, and their connection if it breaks."""

import collections
import errno
import threading

import pytest

from meshlib import rpc
from meshlib.rpc._worker import current_worker
from tests.support.meshlib.rpc_workers import workers

CALLS = 1000
gate = threading.Event()
ran = []


@pytest.fixture(autouse=True)
def _nothing_ran():
    gate.clear()
    ran.clear()


def run(number):
    ran.append(number)
    return number


def run_behind_the_gate(number):
    assert gate.wait(90)
    return run(number)


def test_one_thread_runs_the_calls_of_one_caller_in_their_order():
    def program():
        calls = [rpc.rpc_async(1, run, (i,)) for i in range(CALLS)]
        assert rpc.wait_all(calls) == list(range(CALLS))

    workers(2, program, threads=1)
    assert ran == list(range(CALLS))


def test_no_reply_waits_for_a_call_that_takes_long():
    def program():
        slow, quick = [], []
        for i in range(CALLS):
            if i % 300 == 150:
                slow.append(rpc.rpc_async(1, run_behind_the_gate, (i,)))
            else:
                quick.append(rpc.rpc_async(1, run, (i,)))
        found = rpc.wait_all(quick)
        assert not any(call.done() for call in slow)
        gate.set()
        assert sorted(found + rpc.wait_all(slow)) == list(range(CALLS))

    workers(2, program)


def test_a_connection_that_breaks_amid_many_calls():
    def program():
        calls = []
        for i in range(CALLS):
            calls.append(rpc.rpc_async(1, run, (i,)))
            if i == CALLS // 2:
                calls[i // 2].wait()
                connection = current_worker().channel.connected(1)
                connection.shut(ConnectionResetError(errno.ECONNRESET, "the cable was cut"))
        answered = set()
        for i, call in enumerate(calls):
            try:
                assert call.wait() == i
            except rpc.RpcConnectionError:
                continue
            answered.add(i)
        assert CALLS // 4 in answered
        assert answered <= set(ran)
        assert rpc.rpc_sync(1, run, (CALLS,)) == CALLS

    workers(2, program)
    assert max(collections.Counter(ran).values()) == 1
