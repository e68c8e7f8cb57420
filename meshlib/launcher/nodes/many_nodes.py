"""The coordinator of a job on several nodes.

One agent serves the store, on which the ranks of all nodes meet and the agents keep their log
(see ``records``), and leads. Threads keep this node in touch: one says what there is to say and
that this node is alive, one reads the log, and one notices when the store has fallen silent. None
of them ever holds up the agent.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshlib.diagnosis.event_log import announce_ends, announce_lost
from meshlib.launcher.nodes.agents_log import Follower, Leading, serve_if_ours
from meshlib.launcher.nodes.continuing import ContinuingLeader
from meshlib.launcher.nodes.coordinator import (
    Come,
    Coordinator,
    Decision,
    Placed,
    Placement,
    Stop,
    Verdict,
    last_members,
)
from meshlib.launcher.nodes.leader import Leader, Rules
from meshlib.launcher.nodes.records import (
    LOG,
    Admitted,
    Ended,
    Failed,
    Gone,
    Granted,
    Hello,
    Interrupted,
    Record,
    Refused,
    Result,
    Round,
    StopAll,
    Wanted,
    alive_key,
)
from meshlib.launcher.nodes.waiting import Waiting
from meshlib.launcher.options.launch import NodeOptions
from meshlib.launcher.ranks.failure import RankExit
from transport.deadline import Deadline
from transport.errors import AuthenticationError, DistError, DistNetworkError
from transport.net.sockets import format_address, resolves
from transport.store.base import Store
from transport.store.tcp.server import TCPStoreServer
from transport.store.tcp.store import TCPStore

_CONNECT_SECONDS = 2.0
_MOMENT_SECONDS = 0.3
_PAUSE_SECONDS = 0.1
_FAREWELL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _CutOff(Record):
    """Not of the log: this node has lost touch with it."""

    kind = "cut off"
    reason: str


class ManyNodes(Coordinator):
    """This node's part in a job of ``options.least`` to ``options.most`` nodes.

    ``agent`` names this launch, ``knock`` wakes the agent's loop. Raises DistNetworkError when
    this node is to serve the store and cannot. ``continues``: ranks go on when others are lost.
    """

    def __init__(
        self,
        options: NodeOptions,
        ranks: int,
        max_restarts: int,
        agent: str,
        knock: Callable[[], None],
        *,
        continues: bool = False,
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._agent = agent
        self._knock = knock
        self._secret = bytes.fromhex(options.secret) if options.secret else None
        self._silence = options.config["heartbeat_timeout"]
        self._beat = self._silence / 5
        self._beaten = threading.Event()
        self._inbox: deque[Record] = deque()
        self._outbox: queue.SimpleQueue[Callable[[Store], None] | None] = queue.SimpleQueue()
        self._events: list[Decision] = []
        self._placement: Placement | None = None
        self._ended: Sequence[RankExit] | None = None
        self._cut_off: str | None = None
        self._closing = threading.Event()
        self._follower: Follower | None = None
        self._rules = Rules(
            agent=agent,
            job=options.job,
            least=options.least,
            most=options.most,
            max_restarts=max_restarts,
            join_timeout=options.config["join_timeout"],
            last_call=options.config["last_call_timeout"],
            continues=continues,
        )
        self._waiting = Waiting(self._rules, format_address(options.host, options.port))
        self._server: TCPStoreServer | None = serve_if_ours(options, self._secret)
        self._talker = threading.Thread(target=self._talk, name="meshrun-talker", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="meshrun-watchdog", daemon=True)
        self._talker.start()

    # ------------------------------------------------------------------ the agent's side

    def join(self) -> None:
        """See ``Coordinator``."""
        options = self._options
        self._placement = None
        self._ended = None
        self._waiting.begin(time.monotonic())
        self._say(
            Hello(
                agent=self._agent,
                host=socket.gethostname(),
                ranks=self._ranks,
                node=options.rank,
                least=options.least,
                most=options.most,
                job=options.job,
                continues=self._rules.continues,
            )
        )

    @property
    def alone(self) -> bool:
        """See ``Coordinator``."""
        return False

    def want(self, count: int) -> None:
        """See ``Coordinator``."""
        if self._placement is not None:
            self._say(Wanted(self._agent, self._placement.attempt, count))

    def poll(self) -> list[Decision]:
        """See ``Coordinator``."""
        while self._inbox:
            self._take(self._inbox.popleft())
        events, self._events = self._events, []
        return events

    def failed(self, exit_: RankExit) -> None:
        """See ``Coordinator``."""
        if self._placement is not None:
            loss = exit_.loss
            self._outbox.put(lambda store: announce_lost(store, [loss]))
            attempt = self._placement.attempt
            echo = not exit_.is_cause
            self._say(Failed(self._agent, attempt, exit_.rank, loss.how, echo))

    def finished(self, ranks: Sequence[int]) -> None:
        """See ``Coordinator``."""
        if self._placement is not None:
            attempt = self._placement.attempt
            self._outbox.put(lambda store: announce_ends(store, attempt, ranks))

    def interrupted(self, *, leaves: bool = False) -> None:
        """See ``Coordinator``."""
        if self._placement is None:
            return
        said = threading.Event()
        self._say(Interrupted(self._agent, self._placement.attempt, leaves))
        self._outbox.put(lambda _: said.set())
        said.wait(_MOMENT_SECONDS)

    def ended(self, exits: Sequence[RankExit], interrupted: bool, well: int = 0) -> None:
        """See ``Coordinator``."""
        first = self._ended is None
        self._ended = exits if self._ended is None else self._ended
        if self._cut_off is not None:
            self._events.append(Verdict(False, self._ended, self._cut_off))
            return
        if self._placement is not None and first:
            self._say(Ended(self._agent, self._placement.attempt, list(exits), well))
        all_lost = self._rules.continues and not well
        if interrupted or (all_lost and self._server is None):
            # The others may go on; who started this launcher may start it again.
            self._events.append(Verdict(False, self._ended))

    def close(self) -> None:
        """See ``Coordinator``. The leader stays until the others have left, for some seconds."""
        self._say(Gone(self._agent))
        self._closing.set()
        self._beaten.set()
        self._outbox.put(None)
        if self._cut_off is not None and self._server is None:
            return  # the threads wait for a store that does not answer; the process need not
        self._talker.join(_FAREWELL_SECONDS)
        if self._follower is not None:
            self._follower.close()
        if self._server is not None:
            self._server.close()

    def _take(self, record: Record) -> None:
        """Turn a record into what the agent has to do."""
        placement = self._placement
        self._waiting.hear(record, leads=self._server is not None)
        match record:
            case Round():
                self._place(record)
            case StopAll(attempt=attempt, reason=reason):
                if placement is not None and placement.attempt == attempt:
                    self._events.append(Stop(reason))
            case Result():
                self._conclude(record)
            case Admitted(agent=self._agent):
                self._begin(
                    record.attempt, record.node, record.nodes, record.first, record.world_size
                )
            case Granted(agent=self._agent, attempt=attempt):
                if placement is not None and placement.attempt == attempt:
                    self._events.append(Come(range(record.first, record.first + record.count)))
            case Refused(agent=self._agent, reason=reason):
                self._events.append(Verdict(False, (), reason))
            case Gone(agent=self._agent, lost=str() as why):
                self._lose_touch(f"the node that leads has given this one up: it {why}")
            case _CutOff(reason=reason):
                self._lose_touch(reason)
            case _:
                pass

    def _place(self, record: Round) -> None:
        agents = [member.agent for member in record.members]
        if self._agent not in agents:
            return
        node = agents.index(self._agent)
        ranks = [member.ranks for member in record.members]
        self._begin(record.attempt, node, len(agents), sum(ranks[:node]), sum(ranks))

    def _begin(self, attempt: int, node: int, nodes: int, first: int, size: int) -> None:
        self._placement = Placement(
            attempt=attempt,
            node=node,
            nodes=nodes,
            first_rank=first,
            ranks=self._ranks,
            world_size=size,
            store_host=self._options.host,
            store_port=self._options.port,
            secret=self._options.secret or "",
        )
        self._events.append(Placed(self._placement))

    def _conclude(self, result: Result) -> None:
        exits = result.exits
        if self._placement is not None and self._placement.attempt == result.attempt:
            self._events.append(Verdict(result.again, exits, result.error))
        elif self._placement is None and not result.again:
            if self._rules.continues and not exits and result.error is None:
                self._events.append(Verdict(False))  # it was needed by nobody
                return
            error = result.error or "the job ended before this node could join it"
            self._events.append(Verdict(False, (), error))

    def _lose_touch(self, reason: str) -> None:
        if self._cut_off is not None:
            return
        self._cut_off = reason
        if self._placement is not None and self._ended is None:
            self._events.append(Stop(reason))  # the verdict follows when the ranks have ended
        else:
            self._events.append(Verdict(False, self._ended or (), reason))

    # ------------------------------------------------------------------ the threads' side

    def _say(self, record: Record) -> None:
        self._outbox.put(lambda store: store.append(LOG, record.line()))

    def _talk(self) -> None:
        where = format_address(self._options.host, self._options.port)
        try:
            store = self._connect()
            if store is None:
                return
            with store:
                self._converse(store)
        except DistError as error:
            self._give_up(f"lost touch with the job's store at {where}: {error}")

    def _converse(self, store: TCPStore) -> None:
        """Say that this node is alive, and what there is to say, until it is time to leave."""
        farewell = Gone(self._agent, lost="was lost: its connection to the store broke")
        store.set_will(LOG, farewell.line())
        key = alive_key(self._agent)
        store.set(key, "0")
        self._follow(store.clone())
        self._watchdog.start()
        beats, due = 0, time.monotonic() + self._beat
        while True:
            with contextlib.suppress(queue.Empty):
                action = self._outbox.get(timeout=max(due - time.monotonic(), 0.001))
                if action is None:
                    return
                action(store)
            if time.monotonic() >= due:
                beats, due = beats + 1, time.monotonic() + self._beat
                store.set(key, str(beats))
                self._beaten.set()
                self._waiting.tick(time.monotonic())

    def _follow(self, store: TCPStore) -> None:
        leading = None
        if self._server is not None:
            rules, now = self._rules, time.monotonic()
            leader = (
                ContinuingLeader(rules, now, lambda attempt: last_members(store, attempt))
                if rules.continues
                else Leader(rules, now)
            )
            leading = Leading(leader, store, self._agent, self._silence)
        self._follower = Follower(store, self._agent, leading, self._hear, self._give_up)

    def _watch(self) -> None:
        """Notice when the talker is stuck in a store that has fallen silent."""
        while self._beaten.wait(self._silence):
            if self._closing.is_set():
                return
            self._beaten.clear()
        where = format_address(self._options.host, self._options.port)
        self._give_up(
            f"lost touch with the job's store at {where}: no answer for {self._silence:g} s"
        )

    def _connect(self) -> TCPStore | None:
        """Return a connection to the store as soon as it is served; None when closed before.

        A name that nobody knew when this began may turn out to be this machine's.
        """
        host = self._options.host
        deadline = Deadline.after(self._options.config["join_timeout"])
        undecided = self._server is None
        while not self._closing.is_set():
            try:
                # First and by itself: an answer may take longer than an attempt to connect may.
                if self._server is None and not resolves(host):
                    raise DistNetworkError(f"cannot resolve {host}")
                if undecided:
                    undecided = False
                    self._server = serve_if_ours(self._options, self._secret)
                return self._open_store(min(_CONNECT_SECONDS, deadline.remaining()))
            except AuthenticationError:
                raise
            except DistNetworkError as error:
                if deadline.expired:
                    raise
                self._waiting.tick(time.monotonic(), error)
                self._closing.wait(_PAUSE_SECONDS)
        return None

    def _open_store(self, seconds: float) -> TCPStore:
        # The node that serves does not need the name by which others find it.
        served = self._server.address if self._server is not None else None
        host, port = served or (self._options.host, self._options.port)
        store = TCPStore(host, port, timeout=seconds, secret=self._secret)
        store.set_timeout(self._beat)  # an answer that takes longer than a beat is none
        return store

    def _give_up(self, reason: str) -> None:
        self._hear(_CutOff(reason))

    def _hear(self, record: Record) -> None:
        self._inbox.append(record)
        self._knock()
