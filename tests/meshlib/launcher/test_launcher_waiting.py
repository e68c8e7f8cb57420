"""The messages of a node that waits, and about nodes that it has refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from meshlib._launcher.nodes import agents_log
from meshlib._launcher.nodes.agents_log import SharedLog, Waiting
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
def waiting():
    made = Waiting(NodeOptions(2, 2, host="node0", port=29500), "a")
    made.begin(100.0)
    return made


def said(capsys):
    return capsys.readouterr().err.splitlines()


def test_nodes_that_start_together_say_nothing(waiting, capsys):
    waiting.hear(hello("a"), leads=True)
    waiting.tick(104.0)
    waiting.hear(JoinAccepted("a", 0, 0, 1, 0, 1), leads=True)
    waiting.tick(200.0)
    assert said(capsys) == []


def test_a_node_that_is_held_waits_on_when_another_gets_a_place(waiting, capsys):
    waiting.hear(hello("a"), leads=False)
    waiting.hear(hello("b"), leads=False)
    waiting.hear(JoinAccepted("b", 0, 2, 2, 2, 2), leads=False)
    waiting.tick(110.0)
    assert said(capsys) == ["meshrun: 1 of 2 nodes, waiting at node0:29500, 590 s left"]
    waiting.hear(JoinAccepted("a", 0, 3, 2, 3, 2), leads=False)
    waiting.tick(200.0)
    assert said(capsys) == []


def test_how_many_have_come_and_how_long_it_takes(waiting, capsys):
    waiting.hear(hello("a"), leads=True)
    waiting.tick(110.0)
    waiting.tick(111.0)
    assert said(capsys) == ["meshrun: 1 of 2 nodes, waiting at node0:29500, 590 s left"]
    waiting.tick(140.0)
    assert said(capsys) == ["meshrun: 1 of 2 nodes, waiting at node0:29500, 560 s left"]


def test_between_two_numbers_of_nodes(capsys):
    waiting = Waiting(NodeOptions(3, 8, host="node0", port=1, join_timeout=60.0), "a")
    waiting.begin(0.0)
    for agent in "abc":
        waiting.hear(hello(agent), leads=False)
    waiting.hear(AgentLeft("c"), leads=False)
    waiting.tick(10.0)
    assert said(capsys) == ["meshrun: 2 of 3 to 8 nodes, waiting at node0:1, 50 s left"]


def test_a_store_that_nobody_serves_yet(waiting, capsys):
    waiting.tick(110.0, OSError("cannot connect to node0:29500"))
    assert said(capsys) == [
        "meshrun: waiting for the node that leads, at node0:29500, 590 s left:"
        " cannot connect to node0:29500"
    ]


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_says_whom_it_has_refused_and_why(waiting, capsys, leads):
    waiting.hear(hello("b"), leads=leads)
    waiting.hear(JoinRefused("b", "the job here is --rdzv-id x, not none"), leads=leads)
    words = "meshrun: refused node host-b: the job here is --rdzv-id x, not none"
    assert said(capsys) == ([words] if leads else [])


def test_who_reaches_the_store_in_the_last_moment_has_time_for_what_comes_then():
    nodes = NodeOptions(1, 1, host="127.0.0.1", is_host=1)
    log = SharedLog(LaunchOptions(RankProgram("script", "x"), 1, nodes=nodes), "a", lambda: None)
    try:
        with log._open_store(0.5) as store:
            assert store.timeout.total_seconds() == 2
    finally:
        log.say(AgentLeft("a"))  # else the leader waits till it has read that it leaves
        log.close(in_touch=True)


@pytest.fixture
def follower(monkeypatch):
    """A node that has begun nothing yet, and the socket behind which it looks for the store."""
    monkeypatch.setattr(agents_log, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(SharedLog, "_talk", lambda _: None)
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
    with pytest.raises(AuthenticationError, match="perhaps another program"):
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
    assert log.read() == [CutOff(f"lost touch with the job's store at node0:29500: {why}")]


def test_a_node_that_can_speak_but_not_read_is_told_so(monkeypatch):
    """Reading and speaking are separate requests to etcd: one may fail alone, and the node would
    seem alive, and wait for ever.
    """

    def read(_reader, _timeout):
        raise StoreSilentError("a store: no answer in time", 7.0)

    monkeypatch.setattr(agents_log.LogReader, "read", read)
    heard = threading.Event()
    with closing(TCPStoreServer("127.0.0.1", 0)) as server:
        nodes = NodeOptions(2, 2, host="127.0.0.1", port=server.port, is_host=0)
        log = SharedLog(LaunchOptions(RankProgram("script", "x"), 1, nodes=nodes), "a", heard.set)
        assert heard.wait(LONG)
        assert [type(record) for record in log.read()] == [CutOff]
        log.close(in_touch=True)
