"""The end of RPC in good order: when nothing is under way on any worker.

The worker of the lowest rank that lives asks all others. Each answers when its program has called
``shutdown`` and it does nothing: no call waits for a reply, none is served, no callback runs; its
answer is a number that changes with all it does. When all have answered twice with the same
numbers, there was a moment between at which nobody did anything, and nothing was on its way (a
message that is has a call that waits): nothing can begin any more (Mattern's method of four
counters, 1987). Then it tells them all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from meshlib.calls.future import WaitTimeoutError
from meshlib.rpc.errors import RpcTimeoutError
from transport.condition import Condition
from transport.deadline import Deadline
from transport.errors import DistError

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent
    from meshlib.rpc.calls import Outgoing

_PAUSE_SECONDS = 0.01
Answer = Callable[[object], None]


class Leaving:
    """One worker's part in that."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._wanted = False
        self._waiting: list[Answer] = []
        self._down = False
        self._changed = Condition()

    def leave(self, seconds: float) -> None:
        """Return when all workers that live have called this and nothing is under way.

        Raises ``RpcTimeoutError`` after ``seconds`` (0: never) that names who is missing.
        """
        agent = self._agent
        self._wanted = True
        agent.clock.ring()
        deadline = Deadline.after(seconds or threading.TIMEOUT_MAX)
        while not self._down:
            others = [r for r in range(len(agent.workers)) if r not in agent.peers.lost]
            if others[0] == agent.rank:
                self._lead(others[1:], deadline)
                return
            with self._changed.lock:
                late = deadline.expired
                self._changed.wait_for(lambda: self._down, min(deadline.remaining(), 0.2))
            if late and not self._down:
                who = agent.who(others[0])
                raise _too_late(deadline, f"{who} has not ended it: {self._own_state()}")

    def on_question(self, what: str, answer: Answer) -> None:
        """Answer the worker that leads: ``idle`` when this one is, ``down`` at once."""
        if what == "down":
            answer(None)
            with self._changed.lock:
                self._down = True
                self._changed.notify_all()
            return
        with self._lock:
            self._waiting.append(answer)
        self._agent.clock.ring()

    def tick(self) -> float | None:
        """Answer if there is something to answer; return after how long to look again."""
        if not self._waiting or not self._wanted:
            return None
        activity = self._agent.activity()
        if activity is None:
            return _PAUSE_SECONDS
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer(activity)
        return None

    def _lead(self, others: list[int], deadline: Deadline) -> None:
        before: dict[int, object] | None = None
        while True:
            numbers = self._wave("idle", others, deadline)
            numbers[self._agent.rank] = self._await_own(deadline)
            if numbers == before:
                break
            before = numbers
        self._wave("down", others, deadline)

    def _wave(self, what: str, others: list[int], deadline: Deadline) -> dict[int, object]:
        agent = self._agent
        asked: dict[int, Outgoing] = {}
        for rank in others:
            try:
                agent.peers.connection(rank, max(deadline.remaining(), 0.1))
            except RpcTimeoutError as error:
                raise _too_late(deadline, f"{agent.who(rank)} was not reached in time") from error
            except DistError:
                continue  # lost: nobody waits for it
            asked[rank] = agent.ask(rank, what, seconds=0)
        said: dict[int, object] = {}
        for rank, call in asked.items():
            with suppress(WaitTimeoutError):
                call.block(deadline.remaining(), lambda: "shutdown")
            if not call.done():
                missing = ", ".join(agent.who(r) for r, c in asked.items() if not c.done())
                why = f"{missing} have not called it, or are not done with their calls"
                raise _too_late(deadline, why)
            if call.exception() is None:
                said[rank] = call.value()
        return said

    def _await_own(self, deadline: Deadline) -> int:
        while (activity := self._agent.activity()) is None:
            if deadline.expired:
                raise _too_late(deadline, self._own_state())
            time.sleep(_PAUSE_SECONDS)
        return activity

    def _own_state(self) -> str:
        agent = self._agent
        calls = [call for call in agent.pending() if not call.is_question]
        if calls:
            names = ", ".join(f"{c.what} on {agent.who(c.to)}" for c in calls[:8])
            return f"{len(calls)} calls of this worker wait for their replies: {names}"
        serving = agent.server.under_way
        return f"this worker serves {len(serving)} calls" if serving else "this worker is done"


def _too_late(deadline: Deadline, why: str) -> RpcTimeoutError:
    return RpcTimeoutError(f"shutdown() was not done after {deadline.seconds:g} s: {why}")
