"""Calls that wait for each other in a circle, and for ever.

A function that waits for a call, or for an object that is being made, waits for another function:
that which serves the call, or makes the object. Whoever has waited for a second follows this from
worker to worker. Where it comes back to its own call, and does so twice by the same way, there was
a moment at which all of them waited, and none can go on.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from meshlib.calls.future import Future
from meshlib.rpc.calls import Outgoing, RpcFuture, name_of, settle
from meshlib.rpc.errors import WaitCycleError
from meshlib.rpc.recording import Key
from meshlib.rpc.serving import Serving
from transport.errors import DistError

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent

PATIENCE = 1.0
_AGAIN_SECONDS = 2.0
_ANSWER_SECONDS = 1.0
_MOST_STEPS = 1000


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
        self._agent.peers.connection(worker, _ANSWER_SECONDS)
        asked = self._agent.ask(worker, "waits", key, seconds=_ANSWER_SECONDS)
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
