"""The log that the agents of several nodes share, in the store on which their ranks meet.

The agent that serves the store leads. Two threads connect this node to the log, so that the store
never delays the agent. The talker appends this node's records and its heartbeat. The reader follows
the log and, on the leading node, makes the decisions.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshlib._command_line import say
from meshlib._events.log import LogReader, announce_lost
from meshlib._launcher.nodes.continuing import last_members, leader_of
from meshlib._launcher.nodes.coordinator import AgentLog, News
from meshlib._launcher.nodes.leader import Leader
from meshlib._launcher.nodes.records import (
    LOG,
    AgentLeft,
    AgentRecord,
    CutOff,
    JoinAccepted,
    JoinDeferred,
    JoinRefused,
    JoinRequest,
    Knock,
    Leads,
    alive_key,
    answer_key,
    parse,
)
from meshlib._launcher.options.launch import LaunchOptions, NodeOptions
from transport._deadline import Deadline
from transport._errors import AuthenticationError, DistError, DistNetworkError, StoreSilentError
from transport._net.auth import HANDSHAKE_SECONDS
from transport._net.sockets import format_address, is_local, resolves
from transport._store.base import Store
from transport._store.tcp.server import TCPStoreServer
from transport._store.tcp.store import TCPStore

if TYPE_CHECKING:
    from meshlib._launcher.nodes.etcd_log import LeaderElection

_CONNECT_SECONDS = 2.0
_MOMENT_SECONDS = 0.3
_PAUSE_SECONDS = 0.1
_CLOSE_SECONDS = 2.0
_FAREWELL_SECONDS = 10.0
"""The time that a finished leader leaves the other agents to read the job's result."""
_FIRST_NOTE_SECONDS = 5.0
"""After how long the user is told that this node waits: nodes that start together need no word."""
_NEXT_NOTE_SECONDS = 30.0


class SharedLog(AgentLog):
    """This node's part in the log of a job on several nodes.

    ``agent`` names this launch, ``knock`` wakes the agent's loop. Raises DistNetworkError when
    this node is to serve the store and cannot.
    """

    alone = False

    def __init__(self, options: LaunchOptions, agent: str, knock: Callable[[], None]) -> None:
        self._options = options
        self._nodes = nodes = options.nodes
        self.host: str = nodes.host
        self.port: int = nodes.port
        self.secret: str = nodes.secret or ""
        self._key = bytes.fromhex(self.secret) or None
        self._agent = agent
        self._knock = knock
        self._silence = nodes.heartbeat_timeout
        self._beat = self._silence / 5
        self._inbox: deque[AgentRecord] = deque()
        self._send_queue: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._follower: Follower | None = None
        self._waiting = Waiting(nodes, agent)
        self._server: TCPStoreServer | None = self._serve()
        self._talker = threading.Thread(target=self._talk, name="meshrun-talker", daemon=True)
        self._talker.start()

    def say(self, record: AgentRecord) -> None:
        """See ``AgentLog``."""
        if isinstance(record, JoinRequest):
            self._waiting.begin(time.monotonic())
        self.tell(lambda store: store.append(LOG, record.line()))

    def read(self) -> list[AgentRecord]:
        """See ``AgentLog``."""
        news: list[AgentRecord] = []
        while self._inbox:
            news.append(self._inbox.popleft())
            leads = self._follower is not None and self._follower.leads
            self._waiting.hear(news[-1], leads=leads)
        return news

    def tell(self, news: News) -> None:
        """See ``AgentLog``."""
        self._send_queue.put(news)

    def flush(self) -> None:
        """See ``AgentLog``."""
        said = threading.Event()
        self.tell(lambda _: said.set())
        said.wait(_MOMENT_SECONDS)

    def close(self, *, in_touch: bool) -> None:
        """See ``AgentLog``. The leader stays until the others have left, for some seconds."""
        self._closing.set()
        self._send_queue.put(None)
        if not in_touch and self._server is None:
            return  # the threads wait for a store that does not answer; the process need not
        self._talker.join(_FAREWELL_SECONDS)
        if self._follower is not None:
            self._follower.close()
        super().close(in_touch=in_touch)

    def _talk(self) -> None:
        try:
            store = self._connect()
            if store is None:
                return
            with store:
                try:
                    self._converse(store)
                except Exception:
                    store.hang_up()  # a goodbye would wait, and withdraw the will
                    raise
        except Exception as error:  # noqa: BLE001  (whatever it is: who hears nothing more waits)
            self._lose_touch(error)

    def _lose_touch(self, error: Exception) -> None:
        why = str(error) if isinstance(error, DistError) else f"{type(error).__name__}: {error}"
        if isinstance(error, StoreSilentError) and error.seconds is not None:
            why = f"no answer for {error.seconds:g} s"
        where = format_address(self.host, self.port)
        self._hear(CutOff(f"lost touch with the job's store at {where}: {why}"))

    def _serve(self) -> TCPStoreServer | None:
        """Return the store's server if it is this node's to serve it, and the time has come."""
        return _serve_if_ours(self._nodes, self._key)

    def _converse(self, store: Store) -> None:
        """Append heartbeats and queued records until this node leaves."""
        farewell = AgentLeft(self._agent, lost="was lost: its connection to the store broke")
        store.set_will(LOG, farewell.line())
        follower, store = store.clone(), store.with_patience(self._silence)
        key = alive_key(self._agent)
        store.set(key, "0")
        self._follow(follower)
        beats, due = 0, time.monotonic() + self._beat
        while True:
            with contextlib.suppress(queue.Empty):
                action = self._send_queue.get(timeout=max(due - time.monotonic(), 0.001))
                if action is None:
                    self._leave(store)
                    return
                action(store)
            if time.monotonic() >= due:
                beats, due = beats + 1, time.monotonic() + self._beat
                store.set(key, str(beats))
                self._keep(store)
                self._waiting.tick(time.monotonic())

    def _keep(self, store: Store) -> None:
        """Keep what the job has in ``store``, if that takes more than a server."""

    def _leave(self, store: Store) -> None:
        """Leave ``store``, where this node has said that it leaves the job."""

    def _follow(self, store: Store) -> None:
        leading = None
        if self._server is not None:
            leader = leader_of(
                self._options, self._agent, lambda attempt: last_members(store, attempt)
            )
            leading = Leading(leader, store, self._agent, Silence(store, self._silence))
        self._follower = Follower(store, self._agent, leading, self._hear, self._lose_touch)

    def _connect(self) -> Store | None:
        """Wait until the store is served and return a connection to it; None if closed before.

        A name that nobody knew when this began may turn out to be this machine's.
        """
        host = self.host
        deadline = Deadline.after(self._nodes.join_timeout)
        undecided = self._server is None
        unanswered: Deadline | None = None
        while not self._closing.is_set():
            try:
                # First and by itself: an answer may take longer than an attempt to connect may.
                if self._server is None and not resolves(host):
                    raise DistNetworkError(f"cannot resolve {host}")
                if undecided:
                    undecided = False
                    self._server = self._serve()
                return self._open_store(min(_CONNECT_SECONDS, deadline.remaining()))
            except DistNetworkError as error:
                if not isinstance(error, AuthenticationError):
                    unanswered = None
                elif error.refused:
                    raise
                elif unanswered is None:
                    # One attempt is too short to tell another program from a busy machine.
                    unanswered = Deadline.after(HANDSHAKE_SECONDS)
                if deadline.expired or (unanswered is not None and unanswered.expired):
                    raise
                self._waiting.tick(time.monotonic(), error)
                self._closing.wait(_PAUSE_SECONDS)
        return None

    def _open_store(self, seconds: float) -> TCPStore:
        # The node that serves does not need the name by which others find it.
        served = self._server.address if self._server is not None else None
        host, port = served or (self.host, self.port)
        store = TCPStore(host, port, timeout=seconds, secret=self._key)
        # Of the time for joining there may be little left; it is not that for an answer.
        store.set_timeout(self._beat)
        return store

    def _hear(self, record: AgentRecord) -> None:
        self._inbox.append(record)
        self._knock()


def _serve_if_ours(nodes: NodeOptions, secret: bytes | None) -> TCPStoreServer | None:
    """Return the store's server if it is this node that has to serve it.

    Raises DistNetworkError when it must and cannot.
    """
    wish = nodes.is_host
    if wish == 0 or (wish < 0 and nodes.rank not in (None, 0)):
        return None
    must = wish == 1 or nodes.rank == 0
    if not must and not is_local(nodes.host):
        return None
    try:
        return TCPStoreServer(nodes.host, nodes.port, secret=secret)
    except DistNetworkError:
        if not must:
            return None  # another agent on this machine was first
        if secret is None or is_local(nodes.host):
            raise
    # The address leads here by some translation on the way: a service, a container's host.
    return TCPStoreServer("", nodes.port, secret=secret)


class Silence:
    """Finds agents that have not changed their sign of life in ``store`` for ``seconds``."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store = store
        self.seconds: float = seconds
        self._heard: dict[str, tuple[bytes, float]] = {}

    def of(self, agents: Sequence[str]) -> list[str]:
        """Return those of ``agents`` that are silent. Ask several times in ``seconds``."""
        now = time.monotonic()
        values = self._store.multi_get([alive_key(agent) for agent in agents]) if agents else []
        for agent, value in zip(agents, values, strict=True):
            if agent not in self._heard or self._heard[agent][0] != value:
                self._heard[agent] = value, now
        return [agent for agent in agents if now - self._heard[agent][1] > self.seconds]


class Leading:
    """Connects a ``leader`` to the log in ``store``. In a store that no node serves, ``term`` is
    the number of times that an agent began to lead.
    """

    def __init__(
        self, leader: Leader, store: Store, agent: str, silence: Silence, term: int = 0
    ) -> None:
        self._leader = leader
        self._store = store
        self._agent = agent
        self._silence = silence
        self._term = term
        self.beat: float = silence.seconds / 5
        """The seconds between two calls of ``tick``."""
        self._next_look = 0.0

    @property
    def alone(self) -> bool:
        """True if no other agent is there, or none any more."""
        return self._leader.present <= {self._agent}

    def take(self, record: AgentRecord) -> None:
        """Append the leader's answers to a record of the log."""
        self._answer(record)
        self._decide(self._leader.receive(record, time.monotonic()))

    def take_over(self, past: Sequence[AgentRecord]) -> None:
        """Go on where another agent has ceased to lead: ``past`` is the log so far."""
        due = self._leader.take_over(past, time.monotonic())
        for record in past:
            self._answer(record)
        self._decide(due)

    def _answer(self, record: AgentRecord) -> None:
        if isinstance(record, Knock):
            self._store.set(answer_key(record.agent), b"")
        losses = self._leader.losses(record)
        if losses:  # they may be waited for: their peers hear it before they are stopped
            announce_lost(self._store, losses)

    def tick(self) -> None:
        """Append the records that the leader's clock makes due."""
        self._decide(self._leader.tick(time.monotonic()))
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self.beat
            self._look_for_silence()

    def _decide(self, decisions: list[AgentRecord]) -> None:
        if decisions:
            author = [Leads(self._agent, self._term)] if self._term else []
            self._store.append(LOG, "".join(record.line() for record in (*author, *decisions)))

    def _look_for_silence(self) -> None:
        """Declare lost each agent whose heartbeat has not changed for too many seconds."""
        why = f"has not been heard of for {self._silence.seconds:g} s"
        silent = self._silence.of(sorted(self._leader.present - {self._agent}))
        self._decide([AgentLeft(agent, lost=why) for agent in silent])


class Follower:
    """A thread that reads the log from its beginning and hands on each record.

    It ends when ``agent`` leaves the job; if ``agent`` leads, when all others have left. If an
    error ends it earlier, it calls ``lose_touch`` with the error. If the store outlives nodes,
    ``election`` decides which agent leads.
    """

    def __init__(
        self,
        store: Store,
        agent: str,
        leading: Leading | None,
        hear: Callable[[AgentRecord], None],
        lose_touch: Callable[[Exception], None],
        election: LeaderElection | None = None,
    ) -> None:
        self._store = store
        self._agent = agent
        self._leading = leading
        self._hear = hear
        self._lose_touch = lose_touch
        self._election = election
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshrun-follower", daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """True if this node's agent leads now."""
        return self._leading is not None

    def join(self) -> None:
        """Wait until the agent's leaving has been read, for some seconds."""
        self._thread.join(_FAREWELL_SECONDS)

    def close(self) -> None:
        """Stop reading, once the agent has said that it leaves."""
        self._closing.set()
        if self._election is None:
            self._thread.join(_CLOSE_SECONDS if self._leading is None else _FAREWELL_SECONDS)
        self._store.close()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 (an agent that hears nothing would wait forever)
            if not self._closing.is_set():
                self._lose_touch(error)

    def _read(self) -> None:
        log = LogReader(self._store, LOG, parse)
        election, left, beat = self._election, False, 3600.0
        while not left or (election is None and self._leading and not self._leading.alone):
            if (source := self._leading or election) is not None:
                beat = source.beat
            for record in log.read(beat):
                if election is not None:
                    counts = election.admits(record)
                    self._leading = election.leading
                    if not counts:
                        continue
                if self._leading is not None:
                    self._leading.take(record)
                left = left or (
                    isinstance(record, AgentLeft)
                    and record.agent == self._agent
                    and not record.lost
                )
                if not left:
                    self._hear(record)
            if election is not None:
                if left:
                    return
                election.tick()
            if self._leading is not None:
                self._leading.tick()


class Waiting:
    """Follows the agents' log while this node waits for a place in the job, and prints a line on
    standard error where a person would wonder.
    """

    def __init__(self, nodes: NodeOptions, agent: str) -> None:
        self._nodes = nodes
        self._agent = agent
        self._where = format_address(nodes.host, nodes.port)
        self._hosts: dict[str, str] = {}
        self._came: set[str] = set()
        self._began: float | None = None
        self._next = 0.0

    def begin(self, now: float) -> None:
        """This node asks for a place, and waits until ``hear`` is told who has got one."""
        self._began = now
        self._next = now + _FIRST_NOTE_SECONDS

    def hear(self, record: AgentRecord, *, leads: bool) -> None:
        """Take note of a record of the log; ``leads``: it is this node's to explain decisions."""
        match record:
            case JoinRequest(agent=agent, host=host):
                self._hosts[agent] = host
                self._came.add(agent)
            case JoinRefused(agent=agent, reason=reason):
                self._came.discard(agent)
                if leads:
                    say("meshrun", f"refused node {self._hosts.get(agent, agent)}: {reason}")
            case JoinDeferred(agent=self._agent, reason=reason):
                say("meshrun", reason)
            case AgentLeft(agent=agent):
                self._came.discard(agent)
            case JoinAccepted(agent=agent):
                self._came.discard(agent)
                if agent == self._agent:  # others may get a place while this node waits on
                    self._began = None
            case _:
                pass

    def tick(self, now: float, unreached: Exception | None = None) -> None:
        """Print the state of the wait if it is time. ``unreached``: the store's error."""
        if self._began is None or now < self._next:
            return
        self._next = now + _NEXT_NOTE_SECONDS
        left = f"{max(0.0, self._began + self._nodes.join_timeout - now):.0f} s left"
        if unreached is not None:
            server = "etcd" if self._nodes.etcd else "the node that leads"
            say("meshrun", f"waiting for {server}, at {self._where}, {left}: {unreached}")
            return
        least, most = self._nodes.least, self._nodes.most
        wanted = str(most) if least == most else f"{least} to {most}"
        # A moment ago it may have been one less: this node itself is here.
        say(
            "meshrun",
            f"{max(1, len(self._came))} of {wanted} nodes, waiting at {self._where}, {left}",
        )
