"""Notes of a node that waits for its place, and of nodes that it has refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from meshlib._launcher.nodes import agents_log, following
from meshlib._launcher.nodes.agents_log import JoinNotes, SharedLog
from meshlib._launcher.nodes.records import (
    AgentLeft,
    CutOff,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
)
from meshlib._launcher.options.launch import LaunchOptions, NodeOptions, RankProgram
from transport._errors import AuthenticationError, StoreSilentError
from transport._net.sockets import listen
from transport._store.tcp.server import TCPStoreServer

LONG = 60.0


def hello(agent):
    return JoinRequest(agent, f"host-{agent}", 1, None, 2, 3, "none")


@pytest.fixture
def notes():
    made = JoinNotes(NodeOptions(2, 2, host="node0", port=29500), "a")
    made.begin(100.0)
    return made


def printed(capsys):
    return capsys.readouterr().err.splitlines()


def test_nodes_that_start_together_say_nothing(notes, capsys):
    notes.on_record(hello("a"), leads=True)
    notes.tick(104.0)
    notes.on_record(JoinAccepted("a", 0, 0, 1, 0, 1), leads=True)
    notes.tick(200.0)
    assert printed(capsys) == []


def test_a_node_that_is_held_waits_on_when_another_gets_a_place(notes, capsys):
    notes.on_record(hello("a"), leads=False)
    notes.on_record(hello("b"), leads=False)
    notes.on_record(JoinAccepted("b", 0, 2, 2, 2, 2), leads=False)
    notes.tick(110.0)
    assert printed(capsys) == ["meshrun: 1 of 2 nodes, waiting at node0:29500, 590 s left"]
    notes.on_record(JoinAccepted("a", 0, 3, 2, 3, 2), leads=False)
    notes.tick(200.0)
    assert printed(capsys) == []


def test_how_many_have_come_and_how_long_it_takes(notes, capsys):
    notes.on_record(hello("a"), leads=True)
    notes.tick(110.0)
    notes.tick(111.0)
    assert printed(capsys) == ["meshrun: 1 of 2 nodes, waiting at node0:29500, 590 s left"]
    notes.tick(140.0)
    assert printed(capsys) == ["meshrun: 1 of 2 nodes, waiting at node0:29500, 560 s left"]


def test_between_two_numbers_of_nodes(capsys):
    notes = JoinNotes(NodeOptions(3, 8, host="node0", port=1, join_timeout=60.0), "a")
    notes.begin(0.0)
    for agent in "abc":
        notes.on_record(hello(agent), leads=False)
    notes.on_record(AgentLeft("c"), leads=False)
    notes.tick(10.0)
    assert printed(capsys) == ["meshrun: 2 of 3 to 8 nodes, waiting at node0:1, 50 s left"]


def test_a_store_that_nobody_serves_yet(notes, capsys):
    notes.tick(110.0, OSError("cannot connect to node0:29500"))
    assert printed(capsys) == [
        "meshrun: waiting for the leading node, at node0:29500, 590 s left:"
        " cannot connect to node0:29500"
    ]


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_says_whom_it_has_refused_and_why(notes, capsys, leads):
    notes.on_record(hello("b"), leads=leads)
    notes.on_record(JoinRefused("b", "the job here is --rdzv-id x, not none"), leads=leads)
    words = "meshrun: refused node host-b: the job here is --rdzv-id x, not none"
    assert printed(capsys) == ([words] if leads else [])


def test_who_reaches_the_store_in_the_last_moment_has_time_for_what_comes_then():
    nodes = NodeOptions(1, 1, host="127.0.0.1", is_host=1)
    log = SharedLog(LaunchOptions(RankProgram("script", "x"), 1, nodes=nodes), "a", lambda: None)
    try:
        with log._open_store(0.5) as store:
            assert store.timeout.total_seconds() == 2
    finally:
        log.post(AgentLeft("a"))  # else the leader waits till it has read that it leaves
        log.close(in_touch=True)


@pytest.fixture
def follower(monkeypatch):
    """A node that has begun nothing yet, and the socket behind which it looks for the store."""
    monkeypatch.setattr(agents_log, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(SharedLog, "_run_sender", lambda _: None)
    with listen() as listener:
        nodes = NodeOptions(2, 2, host="127.0.0.1", port=listener.getsockname()[1], is_host=0)
        log = SharedLog(
            LaunchOptions(RankProgram("script", "x"), 1, nodes=nodes), "a", lambda: None
        )
        yield log, listener
    log.close(in_touch=True)


def test_a_leader_whose_machine_is_busy_is_waited_for(follower):
    """Its kernel accepts, and nobody has the time to answer an attempt."""
    log, listener = follower
    listener.settimeout(LONG)
    with ThreadPoolExecutor(1) as pool, ExitStack() as unanswered:
        connected = pool.submit(log._connect)
        for _ in range(3):
            unanswered.enter_context(listener.accept()[0])
        server = TCPStoreServer(listener=listener.dup())
        connected.result(LONG).close()
    server.close()


def test_another_program_behind_the_port_is_found_out(follower, monkeypatch):
    monkeypatch.setattr(agents_log, "HANDSHAKE_SECONDS", 0.5)
    with pytest.raises(AuthenticationError, match="perhaps a program other"):
        follower[0]._connect()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (StoreSilentError("a store: no answer in time", 7.0), "no answer for 7 s"),
        (StoreSilentError("a store: no route to host"), "a store: no route to host"),
        (OSError(24, "Too many open files"), "OSError: [Errno 24] Too many open files"),
    ],
)
def test_a_store_that_is_cut_off_is_told_of_with_the_time_that_was_waited(monkeypatch, error, why):
    def connect(_log):
        raise error

    monkeypatch.setattr(SharedLog, "_connect", connect)
    nodes = NodeOptions(2, 2, host="node0", port=29500, is_host=0)
    log = SharedLog(LaunchOptions(RankProgram("script", "x"), 1, nodes=nodes), "a", lambda: None)
    log.close(in_touch=True)
    assert log.read() == [CutOff(f"lost the connection to the job's store at node0:29500: {why}")]


def test_a_node_that_can_speak_but_not_read_is_told_so(monkeypatch):
    """Reading and speaking are separate requests to etcd: one may fail alone, and the node would
    seem alive, and wait for ever.
    """

    def read(_reader, _timeout):
        raise StoreSilentError("a store: no answer in time", 7.0)

    monkeypatch.setattr(following.LogReader, "read", read)
    woken = threading.Event()
    with closing(TCPStoreServer("127.0.0.1", 0)) as server:
        nodes = NodeOptions(2, 2, host="127.0.0.1", port=server.port, is_host=0)
        log = SharedLog(LaunchOptions(RankProgram("script", "x"), 1, nodes=nodes), "a", woken.set)
        assert woken.wait(LONG)
        assert [type(record) for record in log.read()] == [CutOff]
        log.close(in_touch=True)
