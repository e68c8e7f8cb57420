"""The agents' log in etcd. No node serves etcd, so the log outlives every node.

All keys of a job have one prefix and one lease, which every agent renews. The last agent to leave
revokes the lease, and etcd deletes the keys. If all agents are killed, the lease expires. The key
``job`` holds the number of the lease. An agent that finds the key appends a ``Knock`` and joins
only after an answer, because the key may be left over from a job whose agents were killed.

One agent leads. If it leaves or falls silent, another takes over, in a new term.
"""

from __future__ import annotations

import contextlib
import time

from meshlib._launcher.nodes.agents_log import SharedLog
from meshlib._launcher.nodes.continuing import last_members, leader_of
from meshlib._launcher.nodes.following import Follower, HeartbeatMonitor, Leading
from meshlib._launcher.nodes.records import (
    LOG,
    AgentLeft,
    AgentRecord,
    JoinRefused,
    JoinRequest,
    Knock,
    Leads,
    answer_key,
    is_decision,
)
from meshlib._launcher.options.launch import LaunchOptions
from transport._errors import DistStoreError, StoreTimeoutError
from transport._store.base import Store
from transport._store.etcd.client import RefusedError
from transport._store.etcd.store import EtcdStore
from transport._store.tcp.server import TCPStoreServer
from transport._waiting.deadline import Deadline

_JOB = "job"
_LEADER = "meshrun/leader"
_ANSWER_SECONDS = 1.0
_PAUSE_SECONDS = 0.1


class EtcdLog(SharedLog):
    """This node's access to the log of a job whose store is in etcd."""

    _knocked = 0
    """The lease of the job to which this agent has sent a ``Knock``."""

    def _serve(self) -> TCPStoreServer | None:
        return None

    def _connect(self) -> Store | None:
        deadline = Deadline.after(self._nodes.join_timeout)
        with EtcdStore(self._nodes.etcd, self._silence) as root:
            while not self._closing.is_set():
                try:
                    job = self._enter(root.with_grace(self._beat))
                except DistStoreError as error:
                    if deadline.expired or isinstance(error, RefusedError):
                        raise
                    self._join_notes.tick(time.monotonic(), error)
                    self._closing.wait(_PAUSE_SECONDS)
                    continue
                if job is not None:
                    self.url = job.url
                    return job
                self._join_notes.tick(time.monotonic())
        return None

    def _enter(self, root: EtcdStore) -> EtcdStore | None:
        """Return the store of the job under ``root``, which is started if there is none.

        Returns None if a job exists but none of its agents has answered yet.
        """
        if not root.check([_JOB]):
            lease = root.grant(2 * self._silence)
            with root.leased(lease) as own:
                if own.compare_set(_JOB, "", str(lease)) == str(lease).encode():
                    return root.leased(lease, f"job-{lease:x}")
                own.revoke()
        with contextlib.suppress(StoreTimeoutError), contextlib.ExitStack() as undo:
            lease = int(root.get(_JOB, timeout=0.0))
            job = undo.enter_context(root.leased(lease, f"job-{lease:x}"))
            if lease != self._knocked:
                job.append(LOG, Knock(self._agent).line())
                self._knocked = lease
            job.wait([answer_key(self._agent)], _ANSWER_SECONDS)
            undo.pop_all()
            return job
        return None

    def _keep(self, store: Store) -> None:
        assert isinstance(store, EtcdStore)
        store.renew()

    def _leave(self, store: Store) -> None:
        assert isinstance(store, EtcdStore)
        assert self._follower is not None
        self._follower.join()
        if not self._election.present:
            store.revoke()

    def _follow(self, store: Store) -> None:
        self._election = LeaderElection(self._options, self._agent, store, self._silence)
        self._follower = Follower(
            store, self._agent, None, self._deliver, self._lose_touch, self._election
        )


class LeaderTerms:
    """The leader's terms in a log: only decisions from the newest term count."""

    def __init__(self) -> None:
        self.newest: int = 0
        self._author = 0

    def admit(self, record: AgentRecord) -> bool:
        """Return whether the next ``record`` of the log counts."""
        if isinstance(record, Leads):
            self._author = record.term
            self.newest = max(self.newest, record.term)
        return self._author == self.newest or not is_decision(record)


class LeaderElection:
    """The election of a leader among the agents, through a store that no node serves."""

    def __init__(self, options: LaunchOptions, agent: str, store: Store, silence: float) -> None:
        self._options = options
        self._agent = agent
        self._store = store
        self._heartbeats = HeartbeatMonitor(store, silence)
        self.beat: float = silence / 5
        """The seconds between calls of ``tick``."""
        self._next_look = 0.0
        self._terms = LeaderTerms()
        self._past: list[AgentRecord] = []
        self._gone: set[str] = set()
        self.present: set[str] = {agent}
        """The participating agents, according to the log read so far."""
        self.leading: Leading | None = None
        """Set while this agent leads."""

    def admits(self, record: AgentRecord) -> bool:
        """Return whether the next ``record`` of the log counts.

        A new ``Leads`` record begins or ends the lead of this agent.
        """
        before = self._terms.newest
        if not self._terms.admit(record):
            return False
        if isinstance(record, Leads):
            if record.term > before:
                self.leading = self._begin() if record.agent == self._agent else None
            return False
        if isinstance(record, JoinRequest):
            self.present.add(record.agent)
        elif isinstance(record, AgentLeft | JoinRefused):
            self.present.discard(record.agent)
            self._gone.add(record.agent)
        self._past.append(record)
        return True

    def tick(self) -> None:
        """Claim the lead if no agent leads, at most once in ``beat`` seconds."""
        if self.leading is not None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.beat
        mine = f"{self._terms.newest + 1} {self._agent}"
        held = self._store.compare_set(_LEADER, "", mine).decode()
        term, agent = int(held.split()[0]), held.split()[1]
        if agent != self._agent and (agent in self._gone or self._heartbeats.silent([agent])):
            mine = f"{term + 1} {self._agent}"
            held = self._store.compare_set(_LEADER, held, mine).decode()
            term, agent = int(held.split()[0]), held.split()[1]
        if agent == self._agent and term > self._terms.newest:
            self._store.append(LOG, Leads(agent, term).line())

    def _begin(self) -> Leading:
        leader = leader_of(
            self._options, self._agent, lambda attempt: last_members(self._store, attempt)
        )
        leading = Leading(leader, self._store, self._agent, self._heartbeats, self._terms.newest)
        leading.take_over(self._past)
        return leading
