"""The worker of a process, which connects caller, server and references to a channel."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from meshlib._arrays.pickling import dump, load
from meshlib._job.current import current_world, find_world
from meshlib._job.world import World
from meshlib._recording.recorder import Record
from meshlib.rpc._calling.caller import LOSS_SECONDS, Caller
from meshlib.rpc._calling.execution import Execution
from meshlib.rpc._calling.frames import FrameKind
from meshlib.rpc._calling.loopback import AnyConnection, Loopback
from meshlib.rpc._calling.recording import CallRecorder
from meshlib.rpc._calling.serving import CallServer
from meshlib.rpc._carriers import Carriers
from meshlib.rpc._errors import answerable, describe, safely
from meshlib.rpc._membership.directory import WorkerDirectory, WorkerInfo
from meshlib.rpc._membership.shutdown import Shutdown
from meshlib.rpc._overdue.cycles import CycleDetector
from meshlib.rpc._overdue.deadlines import Deadlines
from meshlib.rpc._overdue.timer import TimerThread
from meshlib.rpc._references.references import References
from transport._channel.channel import Channel
from transport._channel.connection import ChannelConnection
from transport._channel.frames import ChannelFrame
from transport._channel.threads import ThreadPool
from transport._communicators.runtime import Membership
from transport._errors import (
    AuthenticationError,
    DistBackendError,
    DistError,
    DistNetworkError,
    PeerLostError,
)

_LOGGER = logging.getLogger("meshlib")
BACKLOG_CALLS = 4096
BACKLOG_BYTES = 64 << 20
"""With a larger backlog, a worker reads no requests until the backlog is halved."""


class LocalWorker:
    """The worker of this process, or of this rank if ranks are threads.

    ``membership`` has all workers, and ``name`` is this worker's. At most ``limit`` calls run here
    at once. ``timeout`` is the default timeout of calls in seconds (0: none).
    """

    def __init__(
        self, world: World, membership: Membership, name: str, limit: int, timeout: float
    ) -> None:
        rank, size = membership.rank, membership.size
        self.world = world
        self.rank: int = rank
        self.owns_world = False
        """True if ``init_rpc`` created the World, which then ends with RPC."""
        self._acting: set[int] = set()
        """The threads that are handling frames."""
        threads = ThreadPool(f"meshlib-rpc-{rank}", limit, world.adopt_thread, _log_error)
        self.directory: WorkerDirectory = WorkerDirectory(rank, size, name, world.timeout)
        self.timer: TimerThread = TimerThread(f"meshlib-rpc-timer-{rank}")
        self.execution: Execution = Execution(threads, self.timer.call_at)
        self.channel: Channel = Channel(membership, threads, self.directory.describe)
        self.references: References = References(
            self.directory, self.channel, self.execution, self.timer
        )
        self.recorder: CallRecorder = CallRecorder(
            membership.group, membership.ranks, world.recorded_calls
        )
        self.carriers: Carriers = Carriers()
        self.deadlines: Deadlines = Deadlines(self.timer, world.flight_record.write_if_requested)
        self.server: CallServer = CallServer(
            self.directory,
            self.execution,
            self.references,
            self.carriers,
            self.recorder,
            self._has_left,
        )
        self.caller: Caller = Caller(
            self.directory,
            self.channel,
            Loopback.between(rank, self._deliver_here),
            self.execution,
            self.references,
            self.carriers,
            self.recorder,
            self.deadlines,
            timeout,
            world.timeout,
        )
        self.cycles: CycleDetector = CycleDetector(self.directory, self.execution, self.caller)
        self.shutdown: Shutdown = Shutdown(
            self.directory, self.caller, self.timer, self.activity, self._state
        )
        self.recorder.under_way = self._under_way
        world.flight_record.remote_calls = self.recorder
        self.timer.start(self._tick)
        self.channel.open(self)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers, by rank."""
        return self.directory.infos

    def meet(self, names: Sequence[str]) -> None:
        """Set the names of all workers, by rank, and start listening for losses."""
        self.recorder.workers = tuple(names)
        self.directory.meet(names)
        self.world.listener.on_exit(self.lose)

    # ------------------------------------------------------------------ frames

    def on_frames(self, connection: ChannelConnection, frames: Sequence[ChannelFrame]) -> bool:
        """Handle frames of another worker; return False to pause reading."""
        self._act(connection, self._deliver_all, frames)
        if connection.outgoing:
            return True
        return not (self._is_full() or connection.is_choked)

    def on_post(self, connection: ChannelConnection, data: bytes | memoryview) -> None:
        """Handle another worker's message about references."""
        self._act(connection, self.references.on_post, data)

    def _act(
        self, connection: ChannelConnection, act: Callable[[ChannelConnection, Any], None], on: Any
    ) -> None:
        """Call ``act(connection, on)``, during which the worker counts as active."""
        me = threading.get_ident()
        self._acting.add(me)
        try:
            act(connection, on)
        except (DistError, OSError):
            raise
        except BaseException as error:  # unpickling a user's class may raise anything
            reason = describe(answerable(error))
            who = self.directory.describe(connection.peer)
            text = f"{who} sent a message that cannot be read: {reason}"
            raise DistNetworkError(text) from error
        finally:
            self._acting.discard(me)

    def _deliver_all(self, connection: ChannelConnection, frames: Sequence[ChannelFrame]) -> None:
        for frame in frames:
            self._deliver(connection, frame)

    def _deliver_here(self, connection: Loopback, frame: ChannelFrame) -> None:
        """Handle a frame from this worker to itself, in the sender's thread."""
        self._deliver(connection, frame)
        if not connection.outgoing:
            self.execution.threads.notify()

    def _deliver(self, connection: AnyConnection, frame: ChannelFrame) -> None:
        match frame.kind:
            case FrameKind.REQUEST if not connection.outgoing:
                self.server.accept(connection, frame)
            case FrameKind.REPLY | FrameKind.ERROR if connection.outgoing:
                self.caller.on_reply(connection, frame)
            case FrameKind.QUERY if not connection.outgoing:
                self._on_question(connection, frame)
            case FrameKind.CANCEL if not connection.outgoing:
                call_id, why = (connection.peer, frame.number), "its caller no longer waits"
                call = self.execution.calls.get(call_id)
                if call is not None:
                    call.cancelled = why
            case _:
                raise ConnectionError(f"a frame of kind {frame.kind} has the wrong direction")

    def _on_question(self, connection: AnyConnection, frame: ChannelFrame) -> None:
        def reply(answer: object) -> None:
            with suppress(OSError):
                connection.send(FrameKind.REPLY, frame.number, *dump((answer, None)))

        match load(frame.data):
            case ("where", number):
                reply(self.server.state_of((connection.peer, number)))
                self.deadlines.request_record()
            case ("waits", call_id):
                step = self.cycles.step(call_id)
                reply(None if step is None else tuple(step))
            case ("idle" | "down" as what, *_):
                self.shutdown.on_question(what, reply)
            case question:
                raise ConnectionError(f"expected a question, got {question!r}")

    def _is_full(self) -> bool:
        threads = self.execution.threads
        if threads.backlog < BACKLOG_CALLS and threads.backlog_bytes < BACKLOG_BYTES:
            return False
        return threads.when_short(BACKLOG_CALLS // 2, BACKLOG_BYTES // 2, self._resume)

    def _resume(self) -> None:
        for connection in self.channel.connections():
            connection.resume()

    # ------------------------------------------------------------------ ends

    def on_end(self, connection: ChannelConnection, error: Exception) -> None:
        """Handle the end of a connection."""
        if connection.outgoing:
            self.caller.on_end(connection, error)
        else:
            why = f"the connection of its caller broke ({error})"
            self.execution.cancel(lambda call: call.connection is connection, why)

    def on_refusal(self, peer: int, error: DistError) -> DistError:
        """Return the error for a worker that cannot be reached, after recording a loss."""
        if isinstance(error, PeerLostError):
            self.directory.await_loss(peer, LOSS_SECONDS)
            self.lose(peer, f"is lost: {error}")
            return self.directory.lost_error(peer)
        return AuthenticationError(f"{self.directory.describe(peer)} was refused: {error}")

    def lose(self, rank: int, how: str) -> None:
        """End the calls from and to a lost worker, and drop its references. Idempotent."""
        if not self.directory.lose(rank, how):
            return
        self.channel.forget(rank, f"the worker {how}")
        self.caller.lose(rank)
        why = f"its caller, {self.directory.describe(rank)}, {how}"
        self.execution.cancel(lambda call: call.id[0] == rank, why)
        self.references.forget_worker(rank, how)
        if self.carriers.gradients is not None:
            self.carriers.gradients.lose(rank)

    def _has_left(self) -> bool:
        """Return whether this worker is closed, or the program has left its World."""
        return self.caller.closed or find_world() is not self.world

    def close(self, flush: float = 0.0) -> None:
        """End this worker at once; its open calls fail. Idempotent.

        Queued bytes are sent for at most ``flush`` seconds.
        """
        if self.caller.closed:
            return
        self.caller.closed = True
        self.directory.close()
        pending = self.caller.pending()
        self.recorder.close()
        for call in pending:
            call.record = None
        self.channel.close(flush)
        error = DistBackendError("RPC was shut down on this worker")
        for call in pending:
            call.end(None, error)
        self.execution.cancel(lambda _: True, "RPC was shut down")
        self.timer.close()
        self.execution.threads.close()
        if self.world.rpc is self:
            self.world.rpc = None

    # ------------------------------------------------------------------ state

    def activity(self) -> int | None:
        """Return a number that changes with every activity of this worker, or None while it is
        active: while a call waits for its reply, or a request or callback runs.
        """
        # A reply becomes a callback, and a callback becomes a job that ends or makes a call. The
        # stages are checked in this order, so concurrent activity is seen at a later stage or
        # changes the number.
        threads, caller = self.execution.threads, self.caller
        number = threads.done + caller.last_number
        if any(not call.is_question for call in caller.pending()):
            return None
        if self._acting - {threading.get_ident()} or self.execution.calls:
            return None
        if threads.busy - (1 if threads.in_a_job else 0):
            return None
        return number if number == threads.done + caller.last_number else None

    def _state(self) -> str:
        """Describe the remaining activity of this worker, for messages."""
        calls = [call for call in self.caller.pending() if not call.is_question]
        if calls:
            names = ", ".join(f"{c.what} on {self.directory.describe(c.to)}" for c in calls[:8])
            return f"{len(calls)} calls of this worker wait for replies: {names}"
        served = len(self.execution.calls)
        return f"this worker serves {served} calls" if served else "this worker is idle"

    def _under_way(self) -> list[Record]:
        served = list(self.execution.calls.values())
        made = [call.record for call in self.caller.pending() if call.record is not None]
        return [*map(self.recorder.being_served, served), *made]

    def _tick(self) -> float:
        """Do all due work, in the timer's thread; return the time of the next tick."""
        pauses = self.references.tick(), self.shutdown.tick(), self.cycles.tick()
        due = self.deadlines.tick(self.caller, self.directory.describe)
        now = time.monotonic()
        return min(due, *(now + pause for pause in pauses if pause is not None), math.inf)


def _log_error(error: BaseException) -> None:
    # Formatting the error runs code of its class.
    safely(lambda: _LOGGER.error("a job of a worker's thread raised", exc_info=error), None)


def find_worker() -> LocalWorker | None:
    """Return the worker of the calling thread's World, or None."""
    world = find_world()
    worker = None if world is None else world.rpc
    return worker if isinstance(worker, LocalWorker) else None


def current_worker() -> LocalWorker:
    """Return the worker of the calling thread's World.

    Raises RuntimeError if there is none, and DistBackendError in a forked child.
    """
    world = current_world()
    worker = world.rpc
    if not isinstance(worker, LocalWorker):
        raise RuntimeError("RPC is not initialised; call rpc.init_rpc() first")
    if world.refusal is not None:
        raise world.refusal
    return worker
