"""The agent: one worker's part in RPC. It belongs to the World."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from meshlib.job.current import adopt_thread, current_world, find_world
from meshlib.job.world import World
from meshlib.recording.recorder import Record
from meshlib.rpc.calls import Callbacks, Clock, Outgoing, Request, RpcFuture
from meshlib.rpc.carriers import Carriers
from meshlib.rpc.errors import RpcTimeoutError, answerable, describe, with_cause
from meshlib.rpc.leaving import Leaving
from meshlib.rpc.overdue import PATIENCE, Cycles, Lateness
from meshlib.rpc.peers import Peers
from meshlib.rpc.recording import CallRecorder
from meshlib.rpc.references.holdings import Holdings
from meshlib.rpc.serving import CREATES, UNREAD, Server
from meshlib.rpc.wire.connection import Connection
from meshlib.rpc.wire.frames import Buffer, Frame, Kind
from meshlib.rpc.wire.payload import Payload, load
from meshlib.rpc.wire.recycling import Recycler
from meshlib.rpc.wire.threads import Threads
from transport.checks import to_whole_number
from transport.communicators.runtime import Membership
from transport.errors import DistBackendError, DistError, DistNetworkError

BACKLOG_CALLS = 4096
BACKLOG_BYTES = 64 << 20
"""A worker that has more to do than this reads no more requests until it is half."""


class WorkerInfo(NamedTuple):
    """A worker: its ``name``, unique in the job, and its ``id``, which is its rank."""

    name: str
    id: int


class Agent:
    """Makes this worker's calls and serves those of others.

    ``membership`` are the workers, ``name`` is this one's, ``timeout`` the seconds that a call may
    take if it says nothing else (0: no end), ``limit`` the number of calls that run here at once.
    """

    def __init__(
        self,
        world: World,
        membership: Membership,
        name: str,
        limit: int,
        timeout: float,
    ) -> None:
        self.world = world
        self.rank: int = membership.rank
        self.timeout = timeout
        self.workers: tuple[WorkerInfo, ...] = ()
        self.by_name: dict[str, WorkerInfo] = {}
        self._own_name = name
        self.closed = False
        self.made_world = False
        """Whether the World was made for this, and ends with it."""
        self.leaving: Leaving = Leaving(self)
        self._met = threading.Event()
        self._acting: set[int] = set()
        self._last_number = 0
        self._next_deadline = math.inf
        self._deadlines = threading.Lock()
        self.next_number: Callable[[], int] = itertools.count(1).__next__
        self.recorder: CallRecorder = CallRecorder(
            membership.group, membership.ranks, world.recorded_calls
        )
        self.carriers: Carriers = Carriers()
        self.recycler: Recycler = Recycler()
        self._cycles = Cycles(self)
        self._local: dict[int, Outgoing] = {}
        self.threads: Threads = Threads(str(self.rank), limit, lambda: adopt_thread(world))
        self.callbacks: Callbacks = Callbacks(self.threads)
        self.holdings: Holdings = Holdings(self, membership.size)
        self.server: Server = Server(self)
        self._lateness = Lateness(self)
        self.clock: Clock = Clock(f"clock-{self.rank}", self._tick)
        self.peers: Peers = Peers(self, membership)
        self.recorder.under_way = self._under_way
        world.calls = self.recorder

    # ------------------------------------------------------------------ who

    def meet(self, names: Sequence[str]) -> None:
        """Note the names of all workers, by rank, and begin to hear who is lost."""
        self.workers = tuple(WorkerInfo(name, rank) for rank, name in enumerate(names))
        self.by_name = {worker.name: worker for worker in self.workers}
        self.recorder.workers = tuple(names)
        self._met.set()
        self.world.hearing.on_end(self.peers.lose)

    def find(self, to: object) -> int:
        """Return the rank of a worker that is given by its name, its rank or its ``WorkerInfo``.

        Raises ValueError for one that there is not, TypeError for anything else.
        """
        if type(to) is int and 0 <= to < len(self.workers):  # the usual case at once
            return to
        self._met.wait(self.world.timeout)
        if isinstance(to, WorkerInfo):
            to = to.id
        if isinstance(to, str):
            found = self.by_name.get(to)
            if found is None:
                names = ", ".join(repr(name) for name in sorted(self.by_name)[:16])
                raise ValueError(f"to is {to!r}, and no worker has that name; there are {names}")
            return found.id
        try:
            rank = to_whole_number(to, "to")
        except TypeError:
            raise TypeError(
                f"to must be a worker's name, its rank or its WorkerInfo, got {to!r}"
            ) from None
        if not 0 <= rank < len(self.workers):
            raise ValueError(f"to is {rank}; expected a rank from 0 to {len(self.workers) - 1}")
        return rank

    def name_of(self, rank: int) -> str:
        """Return a worker's name."""
        if rank == self.rank:
            return self._own_name
        return self.workers[rank].name if self.workers else f"rank{rank}"

    def who(self, rank: int) -> str:
        """Return what messages call a worker."""
        return f"worker {self.name_of(rank)!r} (rank {rank})"

    # ------------------------------------------------------------------ calling

    def call(
        self,
        to: int,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None = None,
        *,
        kept: object = None,
        number: int = 0,
        what: str = "",
    ) -> Outgoing:
        """Send a request and return its future. ``kept`` lives until the reply. With a ``number``,
        which is the caller's ``next_number()``, the value stays there as the object
        ``(rank, number)``. ``what`` is the function's name in messages.

        Raises what pickling the arguments raises, ``WorkerLostError``, ``DistNetworkError``.
        """
        if self.closed:
            raise DistBackendError("RPC was shut down on this worker")
        gradients = self.carriers.gradients
        if gradients is not None:
            again = Request(to, func, timeout, kept, what)
            replaced = gradients.replace(again, args, kwargs, bool(number))
            if replaced is not None:
                return replaced
        seconds = self.timeout if timeout is None else timeout
        call = Outgoing(self, number or self.next_number(), to, func, seconds, kept, what)
        self._last_number = call.number
        sent = self.carriers.send(to) if self.carriers else None
        serving = self.server.current
        parent = None if serving is None else serving.key
        payload = self.holdings.dump((func, args, kwargs, sent, parent), to, call.passed)
        call.record = self.recorder.made(
            call.number, to, call.what, payload.nbytes, seconds, parent
        )
        call.sent = sent
        flags = CREATES if number else 0
        try:
            if to == self.rank:
                self._call_here(call, payload, flags)
            else:
                self._send_request(call, payload, flags)
        except BaseException as error:
            call.record.end(describe(error))
            self.holdings.lose(to, [call])
            raise
        return call

    def _call_here(self, call: Outgoing, payload: Payload, flags: int) -> None:
        self._local[call.number] = call
        self.watch_deadline(call.due)
        buffers = [Buffer(b.nbytes, 0, memoryview(bytearray(b))) for b in payload.buffers]
        frame = Frame(Kind.REQUEST, flags, call.number, payload.data, buffers)
        self.server.accept(None, self.rank, frame)
        self.threads.ring()

    def _send_request(self, call: Outgoing, payload: Payload, flags: int) -> None:
        again = False
        while True:
            try:
                connection = self.peers.connection(call.to, call.seconds, call)
            except RpcTimeoutError as error:
                self._lateness.want_record()
                self.holdings.lose(call.to, [call])
                call.end(None, error)
                return
            call.connection = connection
            connection.calls[call.number] = call
            self.watch_deadline(call.due)
            try:
                connection.send(Kind.REQUEST, call.number, payload, flags)
            except OSError:
                # It has not been sent as a whole, so nobody has run it.
                if not self.peers.reclaim(connection, call, last=again):
                    return
                again = True
                continue
            break
        if connection.is_choked:
            left = None if not call.seconds else max(call.due - time.monotonic(), 0.0)
            connection.wait_for_room(left)

    @contextmanager
    def waiting(self, future: RpcFuture) -> Generator[None]:
        """Let others run in the slot of a call or a callback that waits for ``future``."""
        serving = self.server.current
        if serving is None:
            with self.threads.slot_given_up():
                yield
            return
        before = serving.waits_for, serving.waits_since
        serving.waits_for, serving.waits_since = future, time.monotonic()
        self.clock.due(serving.waits_since + PATIENCE)
        try:
            with self.threads.slot_given_up():
                yield
        finally:
            serving.waits_for, serving.waits_since = before

    # ------------------------------------------------------------------ what comes

    def pending(self) -> list[Outgoing]:
        """Return the calls of this worker that have not ended."""
        return [*self.peers.pending(), *list(self._local.values())]

    def _under_way(self) -> list[Record]:
        served = list(self.server.under_way.values())
        made = [call.record for call in self.pending() if call.record is not None]
        return [*map(self.recorder.being_served, served), *made]

    def on_frames(self, connection: Connection, frames: Sequence[Frame]) -> bool:
        """Act on frames that came; False: no more are to be read for now."""
        me = threading.get_ident()
        self._acting.add(me)
        try:
            self._act_on(connection, frames)
        except (DistError, OSError):
            raise
        except BaseException as error:
            said = describe(answerable(error))
            text = f"{self.who(connection.peer)} sent what cannot be understood: {said}"
            raise DistNetworkError(text) from error
        finally:
            self._acting.discard(me)
        if connection.outgoing:
            return True
        return not (self._is_full() or connection.is_choked)

    def _act_on(self, connection: Connection, frames: Sequence[Frame]) -> None:
        for frame in frames:
            match frame.kind:
                case Kind.REQUEST if not connection.outgoing:
                    self.server.accept(connection, connection.peer, frame)
                case Kind.REPLY | Kind.ERROR if connection.outgoing:
                    self._on_reply(connection, frame)
                case Kind.NOTICE:
                    self.peers.on_notice(connection, frame)
                case Kind.ASK if not connection.outgoing:
                    self._answer_question(connection, frame)
                case Kind.TAKEN:
                    connection.lent.pop(frame.call, None)
                case Kind.CANCEL:
                    self.server.cancel((connection.peer, frame.call), "its deadline has passed")
                case Kind.HELLO if not connection.outgoing:
                    self.peers.on_hello(connection, frame)
                case _:
                    raise ConnectionError(f"a frame of kind {frame.kind} came the wrong way")

    def _is_full(self) -> bool:
        threads = self.threads
        if threads.backlog < BACKLOG_CALLS and threads.backlog_bytes < BACKLOG_BYTES:
            return False
        return threads.when_short(BACKLOG_CALLS // 2, BACKLOG_BYTES // 2, self._resume)

    def _resume(self) -> None:
        for connection in self.peers.connections():
            connection.resume()

    def _on_reply(self, connection: Connection, frame: Frame) -> None:
        connection.lent.pop(frame.call, None)
        call = connection.calls.pop(frame.call, None)
        buffers = ()
        if frame.buffers:
            try:
                buffers = connection.fetch(frame)
            except OSError:
                if call is not None:  # it ends as all that are pending on this connection
                    connection.calls[frame.call] = call
                raise
            if any(buffer.memory is None for buffer in frame.buffers):
                with suppress(OSError):
                    connection.send(Kind.TAKEN, frame.call)
        self._settle(call, frame, buffers)

    def on_local_reply(self, frame: Frame, buffers: Sequence[memoryview]) -> None:
        """End a call of this worker to itself."""
        self._settle(self._local.pop(frame.call, None), frame, buffers)

    def _settle(self, call: Outgoing | None, frame: Frame, buffers: Sequence[memoryview]) -> None:
        value, error = None, None
        if frame.flags & UNREAD and call is not None:
            self.holdings.lose(call.to, [call])
        try:
            # Also where nobody waits any more: references in it are to be released.
            value, more = load(frame.data, buffers)
            if frame.kind == Kind.ERROR:
                error = with_cause(answerable(value), more)
            elif more is not None and call is not None:
                self.carriers.receive(call.sent or {}, more, call.to)
        except BaseException as problem:  # noqa: BLE001 (what unpickling may raise is the caller's)
            error = answerable(problem)
        if call is not None:
            call.end(value, error)

    # ------------------------------------------------------------------ questions

    def ask(self, to: int, *question: Any, seconds: float) -> Outgoing:
        """Ask the worker ``to`` itself, on the connection that there is; 0 seconds: for ever."""
        call = Outgoing(self, self.next_number(), to, question[0], seconds, None)
        connection = self.peers.existing(to)
        if connection is None:
            call.end(None, DistBackendError("there is no connection"))
            return call
        connection.calls[call.number] = call
        self.watch_deadline(call.due)
        try:
            connection.send(Kind.ASK, call.number, self.holdings.dump(question, None))
            connection.poll()
        except OSError as error:
            connection.calls.pop(call.number, None)
            call.end(None, error)
        return call

    def _answer_question(self, connection: Connection, frame: Frame) -> None:
        match load(frame.data):
            case ("where", number):
                answer = self.server.describe((connection.peer, number))
                self._lateness.want_record()
            case ("waits", key):
                answer = self._cycles.step(key)
                answer = None if answer is None else tuple(answer)
            case ("idle" | "down" as what, *_):
                self.leaving.on_question(what, lambda said: self._reply(connection, frame, said))
                return
            case question:
                raise ConnectionError(f"expected a question, got {question!r}")
        self._reply(connection, frame, answer)

    def _reply(self, connection: Connection, frame: Frame, answer: object) -> None:
        with suppress(OSError):
            connection.send(Kind.REPLY, frame.call, self.holdings.dump((answer, None), None))

    # ------------------------------------------------------------------ quiet

    def activity(self) -> int | None:
        """Return a number that changes with all that this worker does; None while it does it.

        Does something: a call that waits for its reply, a request, a callback.
        """
        # A reply becomes a callback, and a callback a job that ends or calls: they are looked at in
        # that order, so what moves on meanwhile is met later, or the number is another.
        number = self.threads.done + self._last_number
        if self._local or any(not call.is_question for call in self.peers.pending()):
            return None
        if self._acting - {threading.get_ident()} or self.server.under_way:
            return None
        if self.threads.busy - (1 if self.threads.in_a_job else 0):
            return None
        return number if number == self.threads.done + self._last_number else None

    # ------------------------------------------------------------------ deadlines and ends

    def _tick(self) -> float:
        told = self.holdings.tick()
        self._lateness.write_record()
        now = time.monotonic()
        if now >= self._next_deadline:
            # Who registers a call meanwhile has put it there before, or is heard of afterwards.
            self._next_deadline = math.inf
            found = self._lateness.look()
            with self._deadlines:
                self._next_deadline = min(self._next_deadline, found)
        looks = told, self.leaving.tick(), self._cycles.look()
        pauses = [pause for pause in looks if pause is not None]
        return min(self._next_deadline, *(now + pause for pause in pauses), math.inf)

    def watch_deadline(self, due: float) -> None:
        """Have calls that are late ended at ``due`` (monotonic seconds)."""
        if due < self._next_deadline:
            with self._deadlines:
                self._next_deadline = min(self._next_deadline, due)
            self.clock.due(due)

    def forget_own(self, call: Outgoing) -> bool:
        """Wait no more for a call of this worker to itself; False if it is none."""
        return self._local.pop(call.number, None) is not None

    @property
    def has_left(self) -> bool:
        """Whether this worker ends, or the program has left the World that it belongs to."""
        return self.closed or find_world() is not self.world

    def on_end(self, connection: Connection, error: Exception) -> None:
        """A connection is over."""
        if not connection.outgoing:
            why = f"the connection of its caller broke ({error})"
            self.server.cancel_all(lambda serving: serving.connection is connection, why)
        self.peers.on_end(connection, error)

    def on_lost(self, rank: int, how: str) -> None:
        """A worker is gone: nobody waits for its calls, and it holds no references."""
        why = f"its caller, {self.who(rank)}, {how}"
        self.server.cancel_all(lambda serving: serving.key[0] == rank, why)
        self.holdings.bury(rank, how, self.who(rank))
        if self.carriers.gradients is not None:
            self.carriers.gradients.lose(rank)

    def close(self, flush: float = 0.0) -> None:
        """End this worker's part, at once; calls under way fail. Idempotent."""
        if self.closed:
            return
        self.closed: bool = True
        self._met.set()
        error = DistBackendError("RPC was shut down on this worker")
        pending = self.pending()
        self.recorder.close()
        for call in pending:
            call.record = None
        self.peers.close(flush)
        for call in pending:
            call.end(None, error)
        self.server.cancel_all(lambda _: True, "RPC was shut down")
        self.clock.close()
        self.threads.close()
        if self.world.rpc is self:
            self.world.rpc = None


def find_agent() -> Agent | None:
    """Return the agent of the calling thread's World, if there is one."""
    world = find_world()
    agent = None if world is None else world.rpc
    return agent if isinstance(agent, Agent) else None


def current_agent() -> Agent:
    """Return the agent of the calling thread's World.

    Raises RuntimeError when there is none, DistBackendError in a fork of its process.
    """
    world = current_world()
    agent = world.rpc
    if not isinstance(agent, Agent):
        raise RuntimeError("RPC is not initialised; call rpc.init_rpc() first")
    if world.refusal is not None:
        raise world.refusal
    return agent
