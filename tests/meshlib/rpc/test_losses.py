"""References in requests that are lost with their connection: objects end all the same."""

import errno
import pickle
import threading

import pytest

from meshlib import rpc
from meshlib.rpc._calling.caller import orphan
from meshlib.rpc._calling.frames import FrameKind
from meshlib.rpc._references.references import LostRequests
from meshlib.rpc._worker import current_worker
from tests.support.meshlib.rpc_workers import agents, start_thread, until, workers
from transport._channel.frames import ChannelFrame, Control
from transport._errors import DistNetworkError

gate, begun, held = threading.Event(), threading.Semaphore(0), []


@pytest.fixture(autouse=True)
def _closed_gate():
    gate.clear()
    held.clear()


def keep(rref):
    held.append(rref)
    begun.release()
    assert gate.wait(90)


def objects():
    return len(current_worker().references)


def let_go():
    held.clear()


def reference_on(worker):
    """Return a reference to an object that has been made on a worker."""
    rref = rpc.RRef([1, 2]) if worker == 0 else rpc.remote(worker, list, ((1, 2),))
    assert rref.to_here() == [1, 2]
    return rref


def cut(connection):
    connection.shut(ConnectionResetError(errno.ECONNRESET, "cut by a test"))


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_reference_that_never_arrived_is_given_back(owner):
    def program():
        rpc.rpc_sync(1, abs, (-1,))
        rref = reference_on(owner)
        connection = current_worker().channel.connected(1)
        send = connection.send

        def swallow(kind, *args):
            if kind != FrameKind.REQUEST:
                send(kind, *args)

        connection.send = swallow
        call = rpc.rpc_async(1, keep, (rref,))
        del rref
        cut(connection)
        with pytest.raises(rpc.RpcConnectionError):
            call.wait()
        until(lambda: rpc.rpc_sync(owner, objects) == 0)
        assert not held

    workers(3, program)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_reference_that_arrived_before_its_connection_broke_lives_on(owner):
    def program():
        call = rpc.rpc_async(1, keep, (reference_on(owner),))
        begun.acquire()
        cut(current_worker().channel.connected(1))
        with pytest.raises(rpc.RpcConnectionError):
            call.wait()
        # The news of the loss has arrived there, and is settled, when nothing is left of it.
        until(lambda: not agents[0].caller.orphans[1] and settled(agents[1]))
        gate.set()
        assert rpc.rpc_sync(1, use) == [1, 2]
        rpc.rpc_sync(1, let_go)
        del call
        until(lambda: rpc.rpc_sync(owner, objects) == 0)

    workers(3, program)


def use():
    return held[0].to_here()


def settled(agent):
    return agent.channel._peers[0].received >= agents[0].channel._peers[1].posted and not bool(
        agent.references._losses
    )


def test_a_request_that_cannot_be_sent_takes_its_references_back(monkeypatch):
    def program():
        rref = reference_on(2)
        caller = current_worker().caller

        def refuse(*_):
            raise DistNetworkError("refused by a test")

        with monkeypatch.context() as patch:
            patch.setattr(caller, "connect", refuse)
            with pytest.raises(DistNetworkError, match="refused"):
                rpc.rpc_async(1, keep, (rref,))
        del rref
        rpc.rpc_sync(1, abs, (-1,))  # now it is reached, and told
        until(lambda: rpc.rpc_sync(2, objects) == 0)

    workers(3, program)


class Unreadable:
    """Cannot be unpickled where it says."""

    def __init__(self, to):
        self.to = to

    def __reduce__(self):
        return read_on, (self.to,)


def read_on(to):
    if current_worker().rank == to:
        raise KeyError(f"nothing of the kind on {to}")


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_references_in_a_request_that_cannot_be_unpickled_are_given_back(to, first):
    def program():
        rref = reference_on(2)
        args = (Unreadable(to), rref) if first else (rref, Unreadable(to))
        with pytest.raises(KeyError, match="nothing of the kind"):
            rpc.rpc_sync(to, keep, args)
        del rref, args
        until(lambda: rpc.rpc_sync(2, objects) == 0)

    workers(3, program)


def note_agent():
    agents[1] = current_worker()


def test_notices_are_acted_on_in_order_also_by_two_connections(monkeypatch):
    """One thread reads the rest of a broken connection, another one the next connection."""
    acted = []

    def program():
        rpc.rpc_sync(1, note_agent)
        agent, channel = agents[1], agents[1].channel
        on_notice, entered, go_on = agent.references.on_notice, threading.Event(), threading.Event()

        def slowly(rank, notice):
            if notice == ("test", 1):
                entered.set()
                assert go_on.wait(90)
            acted.append(notice[1]) if notice[0] == "test" else on_notice(rank, notice)

        monkeypatch.setattr(agent.references, "on_notice", slowly)
        (connection,) = channel._incoming
        first = channel._peers[0].received + 1

        def act(*notices):
            for notice in notices:
                data = pickle.dumps(("test", notice))
                frame = ChannelFrame(Control.POST, 0, first - 1 + notice, data, ())
                channel.on_frames(connection, [frame])

        one = start_thread(lambda: act(1))
        assert entered.wait(90)
        other = start_thread(lambda: act(1, 2))
        other.join(0.05)  # time for it to go wrong
        go_on.set()
        one.join(90)
        other.join(90)
        channel._peers[0].received = first - 1

    workers(2, program)
    assert acted == [1, 2]


def test_a_call_that_is_added_while_its_connection_ends_is_found():
    class Ending(dict):
        """The calls of a connection; another one is added when they have been looked at."""

        def __iter__(self):
            return iter(self.keys())

        def keys(self):
            found = [*super().keys()]
            self[7] = "added"
            return found

    pending, orphans = Ending({5: "first"}), {}
    orphan(pending, orphans)
    assert {**orphans, **pending} == {5: "first", 7: "added"}


def test_what_is_not_known_any_more_counts_as_arrived():
    losses = LostRequests(lambda caller, number: True)
    for number in range(10_000):
        losses.arrived(3, number, [(0, (1, 1))])
    passed = [(0, (1, 1))]
    losses.failed(3, [(number, passed) for number in (5, 9_999, 10_000)])
    losses.failed(4, [(5, passed)])
    assert losses.settle() == [(3, passed), (4, passed)]
    assert not losses
