"""Follows the log that the agents of several nodes share.

A ``Follower`` reads the records of the log for one agent. On the leading agent, a ``Leading``
appends the leader's decisions, including those about agents whose heartbeats have stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshlib._events.log import LogReader, announce_lost
from meshlib._launcher.nodes.leader import Leader
from meshlib._launcher.nodes.records import (
    LOG,
    AgentLeft,
    AgentRecord,
    Knock,
    Leads,
    alive_key,
    answer_key,
    parse,
)
from transport._store.base import Store

if TYPE_CHECKING:
    from meshlib._launcher.nodes.etcd_log import LeaderElection

CLOSE_SECONDS = 2.0
FAREWELL_SECONDS = 10.0
"""The time that a finished leader gives the other agents to read the job's result."""


class HeartbeatMonitor:
    """Finds agents whose heartbeat in ``store`` has not changed for ``seconds``."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store = store
        self.seconds: float = seconds
        self._last_beats: dict[str, tuple[bytes, float]] = {}

    def silent(self, agents: Sequence[str]) -> list[str]:
        """Return the silent ``agents``. Must be called several times in ``seconds``."""
        now = time.monotonic()
        values = self._store.multi_get([alive_key(agent) for agent in agents]) if agents else []
        for agent, value in zip(agents, values, strict=True):
            if agent not in self._last_beats or self._last_beats[agent][0] != value:
                self._last_beats[agent] = value, now
        return [agent for agent in agents if now - self._last_beats[agent][1] > self.seconds]


class Leading:
    """Connects a ``leader`` to the log in ``store``.

    ``term`` is the number of the leader's term; 0 if a node serves the store.
    """

    def __init__(
        self, leader: Leader, store: Store, agent: str, heartbeats: HeartbeatMonitor, term: int = 0
    ) -> None:
        self._leader = leader
        self._store = store
        self._agent = agent
        self._heartbeats = heartbeats
        self._term = term
        self.beat: float = heartbeats.seconds / 5
        """The seconds between two calls of ``tick``."""
        self._next_look = 0.0

    @property
    def alone(self) -> bool:
        """True if no other agent is present."""
        return self._leader.present <= {self._agent}

    def take(self, record: AgentRecord) -> None:
        """Append the leader's decisions on a record of the log."""
        self._answer(record)
        self._decide(self._leader.receive(record, time.monotonic()))

    def take_over(self, past: Sequence[AgentRecord]) -> None:
        """Continue the work of an earlier leader; ``past`` is the log so far."""
        due = self._leader.take_over(past, time.monotonic())
        for record in past:
            self._answer(record)
        self._decide(due)

    def _answer(self, record: AgentRecord) -> None:
        if isinstance(record, Knock):
            self._store.set(answer_key(record.agent), b"")
        losses = self._leader.losses(record)
        if losses:  # announce them before the peers that may wait for lost ranks are stopped
            announce_lost(self._store, losses)

    def tick(self) -> None:
        """Append the decisions that are due by now."""
        self._decide(self._leader.tick(time.monotonic()))
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self.beat
            self._check_heartbeats()

    def _decide(self, decisions: list[AgentRecord]) -> None:
        if decisions:
            author = [Leads(self._agent, self._term)] if self._term else []
            self._store.append(LOG, "".join(record.line() for record in (*author, *decisions)))

    def _check_heartbeats(self) -> None:
        """Declare the agents lost whose heartbeats have not changed for too long."""
        why = f"sent no heartbeat for {self._heartbeats.seconds:g} s"
        silent = self._heartbeats.silent(sorted(self._leader.present - {self._agent}))
        self._decide([AgentLeft(agent, lost=why) for agent in silent])


class Follower:
    """A thread that reads the log from its beginning and passes each record to ``deliver``.

    It ends when ``agent`` leaves the job; if ``agent`` leads, when all others have left. If an
    error ends it earlier, it calls ``lose_touch(error)``. If no node serves the store, ``election``
    determines the leading agent.
    """

    def __init__(
        self,
        store: Store,
        agent: str,
        leading: Leading | None,
        deliver: Callable[[AgentRecord], None],
        lose_touch: Callable[[Exception], None],
        election: LeaderElection | None = None,
    ) -> None:
        self._store = store
        self._agent = agent
        self._leading = leading
        self._deliver = deliver
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
        """Wait until the agent's own ``AgentLeft`` has been read, for some seconds at most."""
        self._thread.join(FAREWELL_SECONDS)

    def close(self) -> None:
        """Stop reading, after the agent has posted that it leaves."""
        self._closing.set()
        if self._election is None:
            self._thread.join(CLOSE_SECONDS if self._leading is None else FAREWELL_SECONDS)
        self._store.close()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 (an agent without its log would wait forever)
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
                    self._deliver(record)
            if election is not None:
                if left:
                    return
                election.tick()
            if self._leading is not None:
                self._leading.tick()
