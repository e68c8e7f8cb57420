"""Leading the job's nodes: which of them serves the store, and so leads, and the thread that does.

It feeds the agents' log to ``Leader`` and adds the decisions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from meshlib.diagnosis.event_log import LogReader, announce_lost
from meshlib.launcher.nodes.leader import Leader
from meshlib.launcher.nodes.records import LOG, Gone, Record, alive_key, parse
from meshlib.launcher.options.launch import NodeOptions
from transport.errors import DistNetworkError
from transport.net.sockets import is_local
from transport.store.base import Store
from transport.store.tcp.server import TCPStoreServer


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
    """Leads until ``close``.

    ``silence`` is how long an agent may be silent, in seconds; ``give_up`` is told why leading
    has become impossible.
    """

    def __init__(
        self,
        leader: Leader,
        store: Store,
        agent: str,
        silence: float,
        give_up: Callable[[str], None],
    ) -> None:
        self._give_up = give_up
        self._leader = leader
        self._store = store
        self._agent = agent
        self._silence = silence
        self._heard: dict[str, tuple[bytes, float]] = {}
        self._closing = threading.Event()
        self._alone = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshrun-leader", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop once all other agents have left. The next record of the log is the time to look."""
        self._closing.set()

    def close(self, timeout: float) -> None:
        """Stop at the latest after ``timeout`` seconds."""
        self._closing.set()
        self._alone.wait(timeout)
        self._store.close()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._lead()
        except Exception as error:  # noqa: BLE001 (all nodes would wait for a leader that is gone)
            if not self._closing.is_set():
                self._give_up(f"this node can no longer lead the job: {error!r}")
        finally:
            self._alone.set()

    def _lead(self) -> None:
        log = LogReader(self._store, LOG, parse)
        next_look = 0.0
        beat = self._silence / 5
        while not (self._closing.is_set() and self._leader.present <= {self._agent}):
            for record in log.read(beat):
                self._take(record)
            self._decide(self._leader.tick(time.monotonic()))
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + beat
                self._look_for_silence()

    def _take(self, record: Record) -> None:
        losses = self._leader.losses(record)
        if losses:  # they may be waited for: their peers hear it before they are stopped
            announce_lost(self._store, losses)
        self._decide(self._leader.receive(record, time.monotonic()))

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
