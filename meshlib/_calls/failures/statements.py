"""A rank's statement about its calls, for the report of a failed call."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

from meshlib._events.events import Query
from meshlib._events.log import answer_key
from meshlib._recording.call_report import CallReport, report_calls
from meshlib._recording.recorder import COLLECTIVE, Record
from meshlib._recording.stacks import all_stacks, user_stack
from meshlib._records import JsonRecord, build, values_of
from transport._store.base import Store

CALLS_IN_STATEMENT = 3
CALLS_BEFORE = 16
"""How many calls before the failed one a statement lists: an earlier call may differ."""


@dataclass(frozen=True, slots=True)
class Statement(JsonRecord):
    """A rank's last ``calls`` on the group, and its open call on another group (``elsewhere``).

    ``reached`` is the number of the last collective that the rank issued in the group, ``stack``
    the Python stack of its main thread.
    """

    rank: int
    pid: int
    host: str
    reached: int
    calls: Sequence[CallReport]
    elsewhere: Sequence[CallReport]
    stack: Sequence[str]

    @classmethod
    def of(
        cls,
        rank: int,
        records: Sequence[Record],
        thread_id: int | None,
        query: Query,
        reached: int,
        ranks: Sequence[int] = (),
    ) -> Self:
        """Return the answer of ``rank``, whose main thread is ``thread_id``, to ``query``.

        ``ranks`` are the group's global ranks.
        """
        mine = [r for r in records if r.group == query.group]
        # Many asynchronous calls may follow the queried one.
        before = range(query.sequence - CALLS_BEFORE, query.sequence + 1)
        earlier = mine[:-CALLS_IN_STATEMENT]
        recent = [r for r in earlier if r.peer == COLLECTIVE and r.header.sequence in before]
        recent += mine[-CALLS_IN_STATEMENT:]
        elsewhere = [r for r in records if r.group != query.group and not r.ended]
        return cls(
            rank=rank,
            pid=os.getpid(),
            host=_host(),
            reached=reached,
            calls=report_calls(recent, {query.group: ranks}),
            elsewhere=report_calls(elsewhere[-1:]),
            stack=user_stack(thread_id),
        )

    def has_arrived(self, sequence: int) -> bool:
        """True if the rank has issued the collective ``sequence``."""
        return self.reached >= sequence

    def call_at(self, sequence: int) -> CallReport | None:
        """Return the collective number ``sequence``, if the rank has reached it."""
        for call in reversed(self.calls):
            if call.sequence == sequence and call.collective:
                return call
        return None


def put_stacks(store: Store, rank: int, main_thread: int, ticket: str) -> None:
    """Answer ``StackRequest`` with the user's frames of the main thread and all threads' stacks."""
    stacks = {
        "rank": rank,
        "host": _host(),
        "pid": os.getpid(),
        "main": user_stack(main_thread),
        "threads": all_stacks(),
    }
    store.set(answer_key(ticket, rank), json.dumps(stacks))


def put_last_calls(
    store: Store, rank: int, reached: Mapping[str, int], records: Sequence[Record]
) -> None:
    """Store the final statements of ``rank``, which leaves the job, about its groups.

    ``reached`` maps each group to the number of the last collective.
    """
    statements = {
        group: Statement.of(rank, records, None, Query(group, 0, ""), number)
        for group, number in reached.items()
    }
    store.set(_left_key(rank), json.dumps(statements, default=values_of))


def last_calls(store: Store, rank: int, group: str) -> Statement | None:
    """Return the final statement of the departed ``rank`` about ``group``."""
    key = _left_key(rank)
    values = json.loads(store.get(key)).get(group) if store.check([key]) else None
    return None if values is None else build(Statement, values)


def _left_key(rank: int) -> str:
    return f"left/{rank}"


@cache
def _host() -> str:
    """Return the host name. It is cached, because each query releases the GIL."""
    return socket.gethostname()
