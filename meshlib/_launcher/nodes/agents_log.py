"""The log that the agents of several nodes share, in the store of their ranks.

The agent that serves the store leads. Two threads connect this node to the log, so that the store
never delays the agent. The sender appends this node's records and its heartbeat. The follower reads
the log and, on the leading node, makes the decisions (``following``).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from meshlib._launcher.nodes.continuing import last_members, leader_of
from meshlib._launcher.nodes.coordinator import AgentLog, StoreAction
from meshlib._launcher.nodes.following import (
    FAREWELL_SECONDS,
    Follower,
    HeartbeatMonitor,
    Leading,
)
from meshlib._launcher.nodes.joining import JoinNotes
from meshlib._launcher.nodes.records import (
    LOG,
    AgentLeft,
    AgentRecord,
    CutOff,
    JoinRequest,
    alive_key,
)
from meshlib._launcher.options.launch import LaunchOptions, NodeOptions
from transport._errors import AuthenticationError, DistError, DistNetworkError, StoreSilentError
from transport._net.auth import HANDSHAKE_SECONDS
from transport._net.sockets import format_address, is_local, resolves
from transport._store.base import Store
from transport._store.tcp.server import TCPStoreServer
from transport._store.tcp.store import TCPStore
from transport._waiting.deadline import Deadline

_CONNECT_SECONDS = 2.0
_MOMENT_SECONDS = 0.3
_PAUSE_SECONDS = 0.1


class SharedLog(AgentLog):
    """This node's access to the log of a job on several nodes.

    ``agent`` names this launch, ``knock`` wakes the agent's loop. Raises DistNetworkError if this
    node must serve the store and cannot.
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
        self._send_queue: queue.SimpleQueue[StoreAction | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._follower: Follower | None = None
        self._join_notes = JoinNotes(nodes, agent)
        self._server: TCPStoreServer | None = self._serve()
        self._sender = threading.Thread(target=self._run_sender, name="meshrun-sender", daemon=True)
        self._sender.start()

    def post(self, record: AgentRecord) -> None:
        """See ``AgentLog``."""
        if isinstance(record, JoinRequest):
            self._join_notes.begin(time.monotonic())
        self.run_on_store(lambda store: store.append(LOG, record.line()))

    def read(self) -> list[AgentRecord]:
        """See ``AgentLog``."""
        records: list[AgentRecord] = []
        while self._inbox:
            records.append(self._inbox.popleft())
            leads = self._follower is not None and self._follower.leads
            self._join_notes.on_record(records[-1], leads=leads)
        return records

    def run_on_store(self, action: StoreAction) -> None:
        """See ``AgentLog``."""
        self._send_queue.put(action)

    def flush(self) -> None:
        """See ``AgentLog``."""
        written = threading.Event()
        self.run_on_store(lambda _: written.set())
        written.wait(_MOMENT_SECONDS)

    def close(self, *, in_touch: bool) -> None:
        """See ``AgentLog``. The leader waits some seconds for the other agents to leave."""
        self._closing.set()
        self._send_queue.put(None)
        if not in_touch and self._server is None:
            return  # the threads may wait for a silent store; do not join them
        self._sender.join(FAREWELL_SECONDS)
        if self._follower is not None:
            self._follower.close()
        super().close(in_touch=in_touch)

    def _run_sender(self) -> None:
        try:
            store = self._connect()
            if store is None:
                return
            with store:
                try:
                    self._send(store)
                except Exception:
                    store.hang_up()  # an orderly close would wait, and withdraw the will
                    raise
        except Exception as error:  # noqa: BLE001 (an agent without its log would wait forever)
            self._lose_touch(error)

    def _lose_touch(self, error: Exception) -> None:
        why = str(error) if isinstance(error, DistError) else f"{type(error).__name__}: {error}"
        if isinstance(error, StoreSilentError) and error.seconds is not None:
            why = f"no answer for {error.seconds:g} s"
        where = format_address(self.host, self.port)
        self._deliver(CutOff(f"lost the connection to the job's store at {where}: {why}"))

    def _serve(self) -> TCPStoreServer | None:
        """Return the store's server if this node must serve it."""
        return _serve_if_ours(self._nodes, self._key)

    def _send(self, store: Store) -> None:
        """Append heartbeats and queued records until this node leaves."""
        farewell = AgentLeft(self._agent, lost="was lost: its connection to the store broke")
        store.set_will(LOG, farewell.line())
        follower, store = store.clone(), store.with_grace(self._silence)
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
                self._join_notes.tick(time.monotonic())

    def _keep(self, store: Store) -> None:
        """Renew the lease of the job's keys in ``store``, if they need one."""

    def _leave(self, store: Store) -> None:
        """Leave ``store``, after this node has posted that it leaves the job."""

    def _follow(self, store: Store) -> None:
        leading = None
        if self._server is not None:
            leader = leader_of(
                self._options, self._agent, lambda attempt: last_members(store, attempt)
            )
            leading = Leading(leader, store, self._agent, HeartbeatMonitor(store, self._silence))
        self._follower = Follower(store, self._agent, leading, self._deliver, self._lose_touch)

    def _connect(self) -> Store | None:
        """Wait until the store is served; return a connection, or None if closed before.

        An address that cannot be resolved at first may later prove to be this machine's.
        """
        host = self.host
        deadline = Deadline.after(self._nodes.join_timeout)
        undecided = self._server is None
        unanswered: Deadline | None = None
        while not self._closing.is_set():
            try:
                # Resolve separately, because that may exceed the time of an attempt to connect.
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
                    # One attempt is too short to distinguish another program from a busy machine.
                    unanswered = Deadline.after(HANDSHAKE_SECONDS)
                if deadline.expired or (unanswered is not None and unanswered.expired):
                    raise
                self._join_notes.tick(time.monotonic(), error)
                self._closing.wait(_PAUSE_SECONDS)
        return None

    def _open_store(self, seconds: float) -> TCPStore:
        # The serving node need not resolve its own public name.
        served = self._server.address if self._server is not None else None
        host, port = served or (self.host, self.port)
        store = TCPStore(host, port, timeout=seconds, secret=self._key)
        # Little time for joining may be left, so requests get a separate timeout.
        store.set_timeout(self._beat)
        return store

    def _deliver(self, record: AgentRecord) -> None:
        self._inbox.append(record)
        self._knock()


def _serve_if_ours(nodes: NodeOptions, secret: bytes | None) -> TCPStoreServer | None:
    """Return the store's server if this node must serve it.

    Raises DistNetworkError if it must and cannot.
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
    # The address is translated to this machine: that of a service, or of a container's host.
    return TCPStoreServer("", nodes.port, secret=secret)
