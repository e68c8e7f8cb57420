"""Calls past their deadlines: what their callees were doing."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshlib.calls.future import Future
from meshlib.rpc.calls import Outgoing
from meshlib.rpc.errors import RpcTimeoutError
from meshlib.rpc.wire.frames import Kind

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent

ANSWER_SECONDS = 0.5
"""What a callee may take to say what a call that is late does."""


_WRITE_SECONDS = 1.0
"""Flight records are written no more often than this."""


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
            asked = agent.ask(call.to, "where", call.number, seconds=ANSWER_SECONDS)
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
