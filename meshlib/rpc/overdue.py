"""Calls that take too long: past their deadlines, or waiting for each other in a circle.

A function that waits for a call, or for an object that is being made, waits for another function:
that which serves the call, or makes the object. Whoever has waited for a second follows this from
worker to worker. Where it comes back to its own call, and does so twice by the same way, there was
a moment at which all of them waited, and none can go on.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from meshlib.calls.future import Future
from meshlib.rpc.calls import Outgoing, RpcFuture, name_of, settle
from meshlib.rpc.errors import RpcTimeoutError, WaitCycleError
from meshlib.rpc.recording import Key
from meshlib.rpc.serving import Serving
from meshlib.rpc.wire.frames import Kind
from transport.errors import DistError

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent

STATE_SECONDS = 0.5
"""What a callee may take to say what a call that is late does."""
PATIENCE = 1.0
_WRITE_SECONDS = 1.0
"""Flight records are written no more often than this."""
_AGAIN_SECONDS = 2.0
_STEP_SECONDS = 1.0
_MOST_STEPS = 1000


class Lateness:
    """Ends one worker's calls at their deadlines. For its clock."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._written = -math.inf
        self._to_write = False

    def look(self) -> float:
        """End what is late; return the moment of the next deadline (monotonic seconds)."""
        now, due = time.monotonic(), math.inf
        for call in self._agent.pending():
            if call.due > now:
                due = min(due, call.due)
            elif not call.late:
                call.late = True
                self._find_out_why(call)
        return due

    def want_record(self) -> None:
        """Have the clock write this worker's flight record: it makes or serves a late call."""
        self._to_write = True
        self._agent.clock.ring()

    def write_record(self) -> None:
        """Write it if it is wanted, and was not written a moment ago."""
        if self._to_write and time.monotonic() - self._written >= _WRITE_SECONDS:
            self._to_write, self._written = False, time.monotonic()
            self._agent.world.dump_if_asked()

    def _find_out_why(self, call: Outgoing) -> None:
        agent = self._agent
        if call.is_question:
            self._end(call, "")
            return
        self.want_record()
        if call.to == agent.rank:
            self._end(call, agent.server.describe((agent.rank, call.number)))
        else:
            asked = agent.ask(call.to, "where", call.number, seconds=STATE_SECONDS)
            asked.at_once(lambda done: self._on_answer(call, done))

    def _on_answer(self, call: Outgoing, done: Future[Any]) -> None:
        silent = f"{self._agent.who(call.to)} does not answer at all"
        self._end(call, silent if done.failure is not None else done.outcome)

    def _end(self, call: Outgoing, said: str) -> None:
        agent, connection = self._agent, call.connection
        if agent.forget_own(call):
            agent.server.cancel((agent.rank, call.number), "its deadline has passed")
        elif connection is not None:
            connection.calls.pop(call.number, None)
            with suppress(OSError):
                connection.send(Kind.CANCEL, call.number)
        who = agent.who(call.to)
        text = f"{call.what} on {who} passed its deadline of {call.seconds:g} s: {said}"
        call.end(None, RpcTimeoutError(text))


class Step(NamedTuple):
    """A function that waits: where it runs, for which call, what it waits for, and since when."""

    worker: int
    key: Key
    function: str
    awaited: str
    seconds: float
    next_worker: int
    next_key: Key


class Cycles:
    """Looks for circles that the functions which run on one worker are in."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._looked: dict[Key, float] = {}

    def look(self) -> float | None:
        """Follow what has waited for long; return after how many seconds to look again, if at all.

        For the clock.
        """
        now = time.monotonic()
        waiting = [s for s in list(self._agent.server.under_way.values()) if s.waits_for]
        self._looked = {s.key: self._looked.get(s.key, 0.0) for s in waiting}
        for serving in waiting:
            if now - serving.waits_since < PATIENCE:
                continue
            if now - self._looked[serving.key] >= _AGAIN_SECONDS:
                self._looked[serving.key] = now
                self._agent.threads.submit(lambda it=serving: self._follow(it))
        return PATIENCE / 2 if waiting else None

    def step(self, key: Key) -> Step | None:
        """Return what a call that is served here waits for, None if for nothing that is known."""
        serving = self._agent.server.under_way.get(key)
        awaited = serving.waits_for if serving is not None else None
        if serving is None or not isinstance(awaited, RpcFuture) or awaited.done():
            return None
        me, seconds = self._agent.rank, time.monotonic() - serving.waits_since
        name = name_of(serving.func)
        if isinstance(awaited, Outgoing):
            there = f"{awaited.what} on {self._agent.who(awaited.to)}"
            return Step(me, key, name, there, seconds, awaited.to, (me, awaited.number))
        if awaited.object is not None:
            return Step(me, key, name, "an object that is being made", seconds, me, awaited.object)
        return None

    def _follow(self, serving: Serving) -> None:
        awaited = serving.waits_for
        with suppress(DistError):
            first = self._way_back(serving.key)
            if first is None:
                return
            again = self._way_back(serving.key)
            if again is not None and [s.key for s in first] == [s.key for s in again]:
                self._break(awaited, again)

    def _way_back(self, key: Key) -> list[Step] | None:
        """Return the steps from the call ``key``, served here, back to itself."""
        me = self._agent.rank
        steps: list[Step] = []
        worker, at = me, key
        while len(steps) < _MOST_STEPS:
            found = self.step(at) if worker == me else self._ask(worker, at)
            if found is None:
                return None
            steps.append(found)
            worker, at = found.next_worker, found.next_key
            if (worker, at) == (me, key):
                return steps
            if any((s.worker, s.key) == (worker, at) for s in steps):
                return None  # a circle of others, who will find it
        return None

    def _ask(self, worker: int, key: Key) -> Step | None:
        self._agent.peers.connection(worker, _STEP_SECONDS)
        asked = self._agent.ask(worker, "waits", key, seconds=_STEP_SECONDS)
        said: Any = asked.wait()
        return None if said is None else Step(*said)

    def _break(self, awaited: Future[Any] | None, steps: list[Step]) -> None:
        rows = [
            f"  {self._agent.who(s.worker)}: {s.function} waits for {s.awaited}, for"
            f" {s.seconds:.1f} s"
            for s in steps
        ]
        text = "these calls wait for each other, and would for ever:\n" + "\n".join(rows)
        if isinstance(awaited, Outgoing):
            if awaited.connection is not None:
                awaited.connection.calls.pop(awaited.number, None)
            self._agent.forget_own(awaited)
            awaited.end(None, WaitCycleError(text))
        elif awaited is not None:
            settle(awaited, None, WaitCycleError(text))
