"""The agents' log, as each node follows it: what its agent hears, and on one of them what the
leader decides. That is the one that serves the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from meshlib.diagnosis.event_log import LogReader, announce_lost
from meshlib.launcher.nodes.leader import Leader
from meshlib.launcher.nodes.records import LOG, Gone, Record, alive_key, parse
from meshlib.launcher.options.launch import NodeOptions
from transport.errors import DistError, DistNetworkError
from transport.net.sockets import is_local
from transport.store.base import Store
from transport.store.tcp.server import TCPStoreServer

_CLOSE_SECONDS = 2.0
_FAREWELL_SECONDS = 10.0
"""What the leader waits, when it has ended, for the others to read how the job did."""


def serve_if_ours(options: NodeOptions, secret: bytes | None) -> TCPStoreServer | None:
    """Return the store's server if it is this node that has to serve it.

    Raises DistNetworkError when it must and cannot.
    """
    wish = options.config["is_host"]
    if wish == 0 or (wish < 0 and options.rank not in (None, 0)):
        return None
    must = wish == 1 or options.rank == 0
    if not must and not is_local(options.host):
        return None
    try:
        return TCPStoreServer(options.host, options.port, secret=secret)
    except DistNetworkError:
        if not must:
            return None  # another agent on this machine was first
        if secret is None or is_local(options.host):
            raise
    # The address leads here by some translation on the way: a service, a container's host.
    return TCPStoreServer("", options.port, secret=secret)


class Leading:
    """Connects a ``leader`` to the log in ``store``.

    ``silence`` is how long an agent may be silent, in seconds.
    """

    def __init__(self, leader: Leader, store: Store, agent: str, silence: float) -> None:
        self._leader = leader
        self._store = store
        self._agent = agent
        self._silence = silence
        self.beat: float = silence / 5
        """How often ``tick`` is to be called, in seconds."""
        self._next_look = 0.0
        self._heard: dict[str, tuple[bytes, float]] = {}

    @property
    def alone(self) -> bool:
        """Whether no other agent is there, or none any more."""
        return self._leader.present <= {self._agent}

    def take(self, record: Record) -> None:
        """Add to the log what the leader makes of a record of it."""
        losses = self._leader.losses(record)
        if losses:  # they may be waited for: their peers hear it before they are stopped
            announce_lost(self._store, losses)
        self._decide(self._leader.receive(record, time.monotonic()))

    def tick(self) -> None:
        """Add to the log what time has brought about."""
        self._decide(self._leader.tick(time.monotonic()))
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self.beat
            self._look_for_silence()

    def _decide(self, decisions: list[Record]) -> None:
        if decisions:
            self._store.append(LOG, "".join(decision.line() for decision in decisions))

    def _look_for_silence(self) -> None:
        """Declare lost who has not changed its sign of life for too long."""
        agents = sorted(self._leader.present - {self._agent})
        if not agents:
            return
        now = time.monotonic()
        values = self._store.multi_get([alive_key(agent) for agent in agents])
        for agent, value in zip(agents, values, strict=True):
            before = self._heard.get(agent)
            if before is None or before[0] != value:
                self._heard[agent] = value, now
            elif now - before[1] > self._silence:
                why = f"has not been heard of for {self._silence:g} s"
                self._decide([Gone(agent, lost=why)])


class Follower:
    """Reads the log from its beginning and hands each record on, in a thread of its own, to the
    leaving of ``agent``; where that leads, until all others have left.

    ``give_up`` is told why following, or leading, has become impossible.
    """

    def __init__(
        self,
        store: Store,
        agent: str,
        leading: Leading | None,
        hear: Callable[[Record], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._store = store
        self._agent = agent
        self._leading = leading
        self._hear = hear
        self._give_up = give_up
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshrun-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading, once the agent has said that it leaves."""
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS if self._leading is None else _FAREWELL_SECONDS)
        self._store.close()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._read(self._leading)
        except Exception as error:  # noqa: BLE001 (an agent that hears nothing would wait forever)
            if self._leading is not None:
                if not self._closing.is_set():
                    self._give_up(f"this node can no longer lead the job: {error!r}")
            elif not isinstance(error, DistError):
                # Of the store's end the talker's connection tells.
                self._give_up(f"the agents' log cannot be read: {error!r}")

    def _read(self, leading: Leading | None) -> None:
        log = LogReader(self._store, LOG, parse)
        left = False
        while not left or (leading is not None and not leading.alone):
            for record in log.read(3600.0 if leading is None else leading.beat):
                if leading is not None:
                    leading.take(record)
                left = left or (
                    isinstance(record, Gone) and record.agent == self._agent and not record.lost
                )
                if not left:
                    self._hear(record)
            if leading is not None:
                leading.tick()
