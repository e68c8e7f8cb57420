"""Deadlines, connections that break, workers that leave, floods: what the program sees."""

import errno
import socket
import sys
import threading
import time

import numpy as np
import pytest

import meshlib as dist
from meshlib import rpc
from meshlib.rpc import _worker as worker
from meshlib.rpc._overdue import deadlines
from meshlib.rpc._worker import BACKLOG_BYTES, BACKLOG_CALLS, LocalWorker, current_worker
from meshlib.testing import RankError, run_ranks
from tests.support.meshlib.rpc_workers import agents, expire, start_thread, until, workers
from transport._channel import channel
from transport._channel.connection import ChannelConnection
from transport._tcp.meeting.dial import Dial

gate = threading.Event()
begun = threading.Semaphore(0)
seen = []


@pytest.fixture(autouse=True)
def _closed_gate(monkeypatch):
    gate.clear()
    seen.clear()
    while begun.acquire(blocking=False):
        pass
    # A callee that the scheduler has stopped is asked all the same.
    monkeypatch.setattr(deadlines, "STATE_SECONDS", 60.0)


def wait_for_gate():
    begun.release()
    assert gate.wait(90)
    seen.append(rpc.cancelled())


def size_of(array):
    return array.nbytes


def call_back(to):
    call = rpc.rpc_async(to, wait_for_gate)
    begun.acquire()
    expire(call)
    return call.wait()


def test_a_late_call_says_what_the_callee_does_and_goes_on_cancelled():
    def program():
        blocker = rpc.rpc_async(1, wait_for_gate, timeout=77)
        begun.acquire()
        waiting = rpc.rpc_async(1, size_of, (np.zeros(3),))
        expire(blocker)
        with pytest.raises(rpc.RpcTimeoutError) as caught:
            blocker.wait()
        text = str(caught.value)
        assert "wait_for_gate on worker 'w1' (rank 1) passed its deadline of 77 s" in text
        assert "assert gate.wait(90)" in text
        until(lambda: agents[1].execution.threads.backlog == 1)
        expire(waiting)
        with pytest.raises(rpc.RpcTimeoutError, match="it has not begun: all 1 threads are busy"):
            waiting.wait()
        until(lambda: all(call.cancelled for call in list(agents[1].execution.calls.values())))
        gate.set()
        # Both are over there when what came after them is: there is one thread.
        assert rpc.rpc_sync(1, size_of, (np.zeros(3),)) == 24
        assert seen == [True]
        gate.clear()
        with pytest.raises(rpc.RpcTimeoutError, match="wait_for_gate on worker 'w0'"):
            rpc.rpc_sync(0, wait_for_gate, timeout=0.1)
        gate.set()

    workers(2, program, threads=1)


def test_a_deadline_that_passes_while_the_connection_is_made(monkeypatch):
    """The call ends; the attempt goes on, and calls with later deadlines use its connection."""
    way, dials = threading.Event(), []
    monkeypatch.setattr(channel, "GREETING_SECONDS", 90.0)

    def connect(dial, call):
        dials.append(dial)
        assert way.wait(90)
        return really_connect(dial, call)

    really_connect = Dial.connect
    monkeypatch.setattr(Dial, "connect", connect)
    answers = []

    def program():
        waiting = start_thread(lambda: answers.append(rpc.rpc_sync(1, size_of, (np.zeros(3),))))
        until(lambda: dials)
        with pytest.raises(rpc.RpcTimeoutError, match=r"deadline of 0.05 s: the connection to it"):
            rpc.rpc_sync(1, wait_for_gate, timeout=0.05)
        way.set()
        waiting.join(90)
        assert answers == [24]
        assert len(dials) == 1

    workers(2, program)


def test_a_deadline_in_a_nested_call_is_the_callers_error():
    def program():
        with pytest.raises(rpc.RpcTimeoutError, match="on worker 'w0'"):
            rpc.rpc_sync(1, call_back, (0,))
        gate.set()

    workers(2, program)


def test_a_worker_that_dies_when_it_is_greeted_is_gone(monkeypatch):
    """It has accepted the connection, and welcomed it; then it does not listen any more."""
    monkeypatch.setattr(worker, "LOSS_SECONDS", 0.0)
    begin = ChannelConnection.begin

    def program():
        def die(connection, poll):
            if not connection.outgoing:
                runtime = connection._receiver._membership.runtime
                endpoint = runtime.shared("tcp-endpoint", lambda: pytest.fail("there is none"))
                endpoint._acceptor.close()
                connection._sock.shutdown(socket.SHUT_RDWR)
            begin(connection, poll)

        monkeypatch.setattr(ChannelConnection, "begin", die)
        with pytest.raises(rpc.WorkerLostError, match="no longer listens"):
            rpc.rpc_sync(1, abs, (-1,))
        raise KeyError("done")  # the two cannot take leave of each other

    with pytest.raises(RankError, match="done"):
        workers(2, program)


def test_a_connection_that_breaks_before_the_greeting_is_made_again(monkeypatch):
    send, broken = ChannelConnection.send, []

    def break_first(connection, *arguments, **named):
        if connection.outgoing and not broken:
            broken.append(connection)
            connection._sock.shutdown(socket.SHUT_RDWR)
        send(connection, *arguments, **named)

    def program():
        monkeypatch.setattr(ChannelConnection, "send", break_first)
        assert rpc.rpc_sync(1, abs, (-1,)) == 1
        assert isinstance(broken[0].error, ConnectionResetError)

    workers(2, program)


def break_connection(rank):
    connection = current_worker().channel.connected(rank)
    if connection is not None:
        connection.shut(ConnectionResetError(errno.ECONNRESET, "cut by a test"))


def test_a_broken_connection_fails_what_is_pending_and_is_made_anew():
    def program():
        pending = rpc.rpc_async(1, wait_for_gate)
        begun.acquire()
        held = rpc.remote(1, list, ((1, 2),))
        assert held.to_here() == [1, 2]
        break_connection(1)
        with pytest.raises(rpc.RpcConnectionError, match=r"broke .* during .*wait_for_gate"):
            pending.wait()
        assert held.to_here() == [1, 2]
        until(lambda: all(call.cancelled for call in list(agents[1].execution.calls.values())))
        gate.set()
        del held
        until(lambda: rpc.rpc_sync(1, objects) == 0)
        until(lambda: seen)
        assert seen == [True]

    workers(2, program)


def objects():
    return len(current_worker().references)


def test_references_are_counted_right_though_connections_break():
    def program():
        for turn in range(20):
            rref = rpc.remote(1, list, ((turn,),))
            assert rref.to_here() == [turn]
            rpc.rpc_sync(2, keep, (rref,))
            for _ in range(5):
                del rref
                rref = rpc.remote(1, list, ((turn,),))
            assert rref.to_here() == [turn]
            break_connection(1)
            rpc.rpc_sync(2, break_connection, (1,))
            assert rpc.rpc_sync(2, kept) == [turn]
            del rref
        until(lambda: rpc.rpc_sync(1, objects) == 0)

    workers(3, program)


def keep(rref):
    seen.append(rref)


def kept():
    return seen.pop().to_here()


def test_calls_to_a_worker_that_has_left_say_so():
    left = threading.Event()

    def rank():
        rpc.init_rpc(f"w{dist.get_rank()}")
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            left.set()
            return None
        assert left.wait(90)
        errors = []
        while not errors:
            try:
                rpc.rpc_sync(1, size_of, (np.zeros(1),))
            except rpc.WorkerLostError as error:
                errors.append((error.worker, error.rank, "worker 'w1' (rank 1)" in str(error)))
            except rpc.RpcConnectionError:
                pass
        rpc.shutdown()
        return errors

    assert run_ranks(rank, 2)[0] == [("w1", 1, True)]


def test_a_flood_is_kept_with_its_sender():
    calls, nbytes = 200, 1 << 20

    def program():
        array = np.ones(nbytes // 8)
        agent = current_worker()
        agent.caller.connect(1, 30)
        agent.channel.connected(1).lends = False  # as between hosts: all goes through the socket
        blocker = rpc.rpc_async(1, wait_for_gate)
        begun.acquire()
        connection, futures = agent.channel.connected(1), []

        def flood():
            for _ in range(calls):
                futures.append(rpc.rpc_async(1, size_of, (array,)))

        flooding = start_thread(flood)
        there = agents[1].execution.threads  # which does nothing, and takes no more than so much
        until(lambda: connection.is_choked and there.backlog_bytes >= BACKLOG_BYTES)
        time.sleep(0.5)
        assert connection.is_choked
        taken = len(futures)
        assert taken < calls
        gate.set()
        flooding.join(90)
        assert rpc.wait_all(futures) == [nbytes] * calls
        blocker.wait()
        return taken * nbytes

    assert workers(2, program, threads=1) < 128 << 20


def test_a_worker_with_more_calls_than_it_keeps_answers_all():
    def program():
        futures = [rpc.rpc_async(1, int, (i,)) for i in range(3 * BACKLOG_CALLS)]
        assert rpc.wait_all(futures) == list(range(3 * BACKLOG_CALLS))

    workers(2, program, threads=1)


def test_shutdown_names_who_is_missing():
    def rank():
        me = dist.get_rank()
        rpc.init_rpc(f"w{me}")
        dist.barrier()
        if me == 0:
            rpc.rpc_sync(1, int)  # they are connected
            with pytest.raises(rpc.RpcTimeoutError, match=r"worker 'w1' \(rank 1\) have not"):
                rpc.shutdown(timeout=0.2)
        dist.barrier()
        rpc.shutdown()

    run_ranks(rank, 2)


def again(left):
    """Call on and on, from callbacks of callbacks, after all programs have asked to end."""
    if left == 0:
        seen.append("end")
        return
    here = rpc.get_worker_info().id
    rpc.rpc_async(1 - here, again, (left - 1,)).then(lambda done: rpc.rpc_sync(1 - here, int))


def test_shutdown_waits_for_callbacks_that_start_calls():
    def program():
        rpc.rpc_async(1, again, (60,))

    workers(2, program)
    assert seen == ["end"]


def looked_at(agent, moment, move):
    """``agent.activity()``, with ``move()`` called before its line ``moment``; and if it was."""
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        if frame.f_code is not LocalWorker.activity.__code__:
            return None
        if event == "line":
            lines += 1
            if lines == moment:
                move()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return agent.activity(), lines >= moment
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("step", ["a reply becomes a callback", "a callback calls and ends"])
def test_a_worker_is_busy_though_what_it_does_moves_on_while_that_is_looked_at(step):
    def program():
        agent = agents[0]
        moment, moved = 0, True
        while moved:
            moment += 1
            inside, way = threading.Event(), threading.Event()

            def follow(done, inside=inside, way=way):
                inside.set()
                assert way.wait(90)
                if step == "a callback calls and ends":
                    rpc.rpc_async(1, wait_for_gate)

            def to_the_callback(inside=inside):
                gate.set()
                assert inside.wait(90)

            def to_the_next_call(way=way):
                gate.clear()
                way.set()
                begun.acquire()
                until(lambda: not agent.execution.threads.busy)

            rpc.rpc_async(1, wait_for_gate).then(follow)
            begun.acquire()
            move = to_the_callback
            if step == "a callback calls and ends":
                to_the_callback()
                move = to_the_next_call
            found, moved = looked_at(agent, moment, move)
            assert found is None
            gate.set()
            way.set()
            until(lambda: agent.activity() is not None)
            gate.clear()

    workers(2, program)


def test_shutdown_without_grace_fails_what_is_under_way():
    def rank():
        rpc.init_rpc(f"w{dist.get_rank()}")
        pending = None
        if dist.get_rank() == 0:
            pending = rpc.rpc_async(1, wait_for_gate)
            begun.acquire()
            rpc.shutdown(graceful=False)
            with pytest.raises(dist.DistBackendError, match="RPC was shut down on this worker"):
                pending.wait()
        dist.barrier()
        gate.set()
        if dist.get_rank() == 1:
            rpc.shutdown(graceful=False)

    run_ranks(rank, 2)


def test_a_mesh_finds_workers():
    def rank():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "stage"))
        with pytest.raises(RuntimeError, match="RPC is not initialised"):
            mesh["stage"].worker(1)
        rpc.init_rpc(f"w{dist.get_rank()}")
        found = mesh["stage"].worker(1), mesh["dp"].worker(-1), mesh.worker(1, 0)
        assert rpc.rpc_sync(mesh["stage"].worker(1), rpc.get_worker_info) == found[0]
        with pytest.raises(ValueError, match="expected one for each of the 1 dims"):
            mesh["stage"].worker(1, 0)
        with pytest.raises(IndexError, match=r"\(2,\), out of the shape \(2,\)"):
            mesh["stage"].worker(2)
        rpc.shutdown()
        return [worker.id for worker in found]

    assert run_ranks(rank, 4) == [[1, 2, 2], [1, 3, 2], [3, 2, 2], [3, 3, 2]]


def test_a_call_that_takes_long_after_many_quick_ones_keeps_nobody_waiting():
    def program():
        for _ in range(300):
            rpc.rpc_sync(1, int)
        for _ in range(5):
            gate.clear()
            slow = rpc.rpc_async(1, wait_for_gate)
            begun.acquire()
            for _ in range(100):
                assert rpc.rpc_sync(1, int, (7,)) == 7
            gate.set()
            slow.wait()

    workers(2, program)
