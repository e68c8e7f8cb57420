"""How several nodes meet: which serves the job's store, and so leads; what is said meanwhile.

``Leading``'s thread feeds the agents' log to ``Leader`` and adds the decisions. ``Waiting`` tells
the user for whom a node waits and, on the leading one, whom it has refused.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from meshlib.diagnosis.event_log import LogReader, announce_lost
from meshlib.launcher.nodes.leader import Leader, Rules
from meshlib.launcher.nodes.records import (
    LOG,
    Gone,
    Held,
    Hello,
    Record,
    Refused,
    Round,
    alive_key,
    parse,
)
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


FIRST_SECONDS = 5.0
"""After how long the first line comes: nodes that start together need none."""
NEXT_SECONDS = 30.0


class Waiting:
    """Follows the agents' log, and prints a line on standard error where a person would wonder.

    ``where`` is the address at which the nodes meet.
    """

    def __init__(self, rules: Rules, where: str) -> None:
        self._rules = rules
        self._agent = rules.agent
        self._where = where
        self._hosts: dict[str, str] = {}
        self._came: set[str] = set()
        self._began: float | None = None
        self._next = 0.0

    def begin(self, now: float) -> None:
        """This node asks for a place, and waits until ``hear`` is told of a ``Round``."""
        self._began = now
        self._next = now + FIRST_SECONDS

    def hear(self, record: Record, *, leads: bool) -> None:
        """Take note of a record of the log; ``leads``: it is this node's to explain decisions."""
        match record:
            case Hello(agent=agent, host=host):
                self._hosts[agent] = host
                self._came.add(agent)
            case Refused(agent=agent, reason=reason):
                self._came.discard(agent)
                if leads:
                    _say(f"refused node {self._hosts.get(agent, agent)}: {reason}")
            case Held(agent=self._agent, reason=reason):
                _say(reason)
            case Gone(agent=agent):
                self._came.discard(agent)
            case Round():
                self._came.clear()
                self._began = None
            case _:
                pass

    def tick(self, now: float, unreached: Exception | None = None) -> None:
        """Print how things stand if it is time. ``unreached``: why the store was not."""
        if self._began is None or now < self._next:
            return
        self._next = now + NEXT_SECONDS
        left = f"{max(0.0, self._began + self._rules.join_timeout - now):.0f} s left"
        if unreached is not None:
            _say(f"waiting for the node that leads, at {self._where}, {left}: {unreached}")
            return
        least, most = self._rules.least, self._rules.most
        wanted = str(most) if least == most else f"{least} to {most}"
        # A moment ago it may have been one less: this node itself is here.
        _say(f"{max(1, len(self._came))} of {wanted} nodes, waiting at {self._where}, {left}")


def _say(text: str) -> None:
    sys.stderr.write(f"meshrun: {text}\n")
    sys.stderr.flush()
