"""Turning one rank's trouble into one report that every rank raises.

The protocol, over the job's store. ``events`` is a log that each rank's watcher follows.

1. A rank whose call fails tries to become the reporter of its group: the first to write
   ``failure/<group>`` is. The others wait for its report.
2. The reporter appends a ``query``. Each watcher answers with a statement: the rank's last calls
   in the group and the Python stack of its main thread. Who does not answer is silent.
3. The reporter writes an ``abort`` with the full message. Each watcher marks the group as broken
   and aborts its communicators, which wakes whoever is blocked; all raise the same message.

A rank that disappears is announced by a ``rank_exit`` event: by the store's server (a will) or by
the launcher's agent. It breaks every group that the rank was a member of.

A rank that leaves in good order says in a ``leave`` event which groups it has made calls on. There
its channels close, which tells who still waits for it. The other groups go on without it, and
break when a call needs it: nobody would ever open a channel.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshlib.diagnosis.fate import Fate
from meshlib.diagnosis.members import Members
from meshlib.diagnosis.recorder import ANY_SOURCE, COLLECTIVE, Record
from meshlib.diagnosis.stacks import user_stack
from meshlib.launcher.nodes.news import ENDED, LOGS
from transport.call import CallHeader
from transport.deadline import Deadline
from transport.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    HeaderMismatchError,
    PeerLostError,
    RankFailedError,
    StoreTimeoutError,
)
from transport.store.base import Store
from transport.store.prefix_store import PrefixStore

EVENTS = "events"

# How long a reporter waits for statements: a rank that computes answers from its watcher thread
# within milliseconds; only a stopped, dead or wedged one stays silent.
ANSWER_SECONDS = 0.5
DOUBTFUL_SECONDS = 0.15
# A connection can break a moment before the news of why arrives.
NEWS_SECONDS = 0.4
# What the others grant the reporter, beyond which they raise what they saw themselves.
REPORT_SECONDS = 3.0
# What the store may take for an answer when a call has failed: its deadline has passed already.
STORE_SECONDS = 1.5
CALLS_IN_STATEMENT = 3
# How far back a statement goes from the call that was asked about: an earlier one may differ.
CALLS_BEFORE = 16
# A rank that has not come to the call gets this long, so that the table has its call too.
ARRIVAL_SECONDS = 0.25
_ARRIVAL_PAUSE = 0.02
STACK_LINES = 12

_ERRORS: dict[str, type[DistError]] = {
    cls.__name__: cls
    for cls in (CollectiveMismatchError, CollectiveTimeoutError, RankFailedError, DistBackendError)
}


def publish(store: Store, event: Mapping[str, Any]) -> None:
    """Append ``event`` to the job's log."""
    store.append(EVENTS, json.dumps(event) + "\n")


def announce(store: Store, event: Mapping[str, Any]) -> None:
    """Append ``event``, which tells of a failure, unless the store is silent.

    Raises DistStoreError then, after ``STORE_SECONDS``.
    """
    publish(store.with_patience(STORE_SECONDS), event)


def register_log(store: Store) -> None:
    """Let whoever serves the store (a launcher) know where this job's log is.

    The launcher does not know under which prefixes the job keeps its keys.
    """
    log = EVENTS
    while isinstance(store, PrefixStore):
        log = f"{store.prefix}/{log}"
        store = store.underlying_store
    store.append(LOGS, f"{log}\n")


def ended_ranks(store: Store, attempt: str) -> list[int]:
    """Return the ranks whose programs have ended well, as far as a launcher has said so."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    key = f"{ENDED}/{attempt}"
    return [int(line) for line in store.get(key).split()] if store.check([key]) else []


def rank_exit_event(rank: int, how: str) -> dict[str, Any]:
    """Return the event that announces that ``rank`` is gone; ``how`` completes "it …"."""
    return {"kind": "rank_exit", "rank": rank, "how": how}


def leave_event(rank: int, joined: Mapping[str, tuple[int, int] | None]) -> dict[str, Any]:
    """Return the event that ``rank`` has left in good order; ``joined`` are its groups' ids.

    With each goes how far its chain of calls has come, if that is known (``meshlib.job.leaving``).
    """
    return {"kind": "leave", "rank": rank, "joined": joined}


def abort_event(group: str, error: DistError, rank: int) -> dict[str, Any]:
    """Return the event that breaks ``group`` on all its members; ``rank`` sends it."""
    return {
        "kind": "abort",
        "group": group,
        "error": type(error).__name__,
        "message": str(error),
        "lost": error.rank if isinstance(error, RankFailedError) else None,
        "from": rank,
    }


def error_from_event(event: Mapping[str, Any]) -> DistError:
    """Return the exception that an ``abort`` event describes."""
    cls = _ERRORS.get(event["error"], DistBackendError)
    if cls is RankFailedError:
        return RankFailedError(event["message"], event.get("lost"))
    return cls(event["message"])


def statement(
    rank: int,
    records: Sequence[Record],
    thread_id: int | None,
    query: Mapping[str, Any],
    reached: int,
) -> dict[str, Any]:
    """Return what this rank says about itself when it is asked about a call of a group.

    ``reached`` is the number of the last collective that it has issued there.
    """
    group, asked = query["group"], query["sequence"]
    mine = [r for r in records if r.group == group]
    recent = mine[-CALLS_IN_STATEMENT:]
    # Behind many asynchronous calls, the one that was asked about is not among the last.
    recent = [
        r
        for r in mine
        if r in recent
        or (r.peer == COLLECTIVE and asked - CALLS_BEFORE <= r.header.sequence <= asked)
    ]
    return {
        "rank": rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "reached": reached,
        "calls": [r.as_json() for r in recent],
        "elsewhere": [r.as_json() for r in records if r.group != group and not r.ended][-1:],
        "stack": user_stack(thread_id),
    }


def put_last_calls(
    store: Store, rank: int, reached: Mapping[str, int], records: Sequence[Record]
) -> None:
    """Leave behind what ``rank``, which goes, would say about each of its groups when asked.

    ``reached`` has the number of the last collective by group.
    """
    said = {
        group: statement(rank, records, None, {"group": group, "sequence": 0}, number)
        for group, number in reached.items()
    }
    store.set(f"left/{rank}", json.dumps(said))


def _last_calls(store: Store, rank: int, group: str) -> dict[str, Any] | None:
    key = f"left/{rank}"
    return json.loads(store.get(key)).get(group) if store.check([key]) else None


class Reporter:
    """Finds out why a call of a group failed, whose ``fate`` that is, and tells everybody."""

    def __init__(self, fate: Fate, store: Store) -> None:
        self._fate = fate
        self._group = fate.members
        self._store = store.with_patience(STORE_SECONDS)

    def explain(self, record: Record, error: DistError) -> DistError:
        """Return the error that all members raise for ``record``'s failure.

        Blocks for at most ``REPORT_SECONDS`` or so, and for ``STORE_SECONDS`` where the store is
        silent: a rank that is cut off from it raises what it saw itself. Breaks the group.
        """
        group, fate = self._group, self._fate
        if isinstance(error, PeerLostError) and group.ranks[error.peer] not in fate.departed:
            news = fate.await_failure(NEWS_SECONDS)
            if news is not None:
                return news
        mine = secrets.token_hex(8)
        try:
            key = f"failure/{group.id}"
            won = self._store.compare_set(key, "", mine) == mine.encode()
            if not won and (failure := fate.await_failure(REPORT_SECONDS)):
                return failure
            event = self._investigate(record, error, mine)
            if not won:
                # The first reporter is itself gone or stuck: what this rank saw stands.
                return error_from_event(event)
            if known := fate.await_failure(0):
                return known
            publish(self._store, event)
            failure = fate.await_failure(REPORT_SECONDS)
            return failure or error_from_event(event)
        except DistStoreError as store_error:
            # If the store went with the rank that served it, that is known in a moment.
            if news := fate.await_failure(NEWS_SECONDS):
                return news
            kind, lost = self._kind_of(error)
            message = (
                f"{group} failed on rank {group.global_rank}: {error} "
                f"(and the store cannot be asked for more: {store_error})"
            )
            return RankFailedError(message, lost) if kind is RankFailedError else kind(message)

    def _investigate(self, record: Record, error: DistError, ticket: str) -> dict[str, Any]:
        group = self._group
        doubtful = group.ranks[error.peer] if isinstance(error, PeerLostError) else None
        statements = self._ask(ticket, record.header.sequence, doubtful)
        kind, lost = self._kind_of(error)
        if isinstance(error, HeaderMismatchError):
            self._await_arrivals(record.header.sequence, statements)
            message = mismatch_message(group, record, error, statements)
        elif isinstance(error, CommunicatorTimeoutError):
            message = timeout_message(group, record, statements)
        elif isinstance(error, PeerLostError):
            message = lost_message(group, record, error, statements, self._fate.departed)
        elif isinstance(error, RankFailedError):
            message = str(error)
        else:
            message = f"{group} failed on rank {group.global_rank}: {error}"
        return {
            "kind": "abort",
            "group": group.id,
            "error": kind.__name__,
            "message": message,
            "lost": lost,
            "from": group.global_rank,
        }

    def _kind_of(self, error: DistError) -> tuple[type[DistError], int | None]:
        """Return what all members raise for ``error``, and the rank that is gone, if one is."""
        if isinstance(error, HeaderMismatchError):
            return CollectiveMismatchError, None
        if isinstance(error, CommunicatorTimeoutError):
            return CollectiveTimeoutError, None
        if isinstance(error, PeerLostError):
            return RankFailedError, self._group.ranks[error.peer]
        if isinstance(error, RankFailedError):
            return RankFailedError, error.rank
        return DistBackendError, None

    def _await_arrivals(self, sequence: int, statements: dict[int, dict[str, Any]]) -> None:
        """Ask again, for a moment, until all members that answer have come to the collective."""
        deadline = Deadline.after(ARRIVAL_SECONDS)
        while not deadline.expired and not self._fate.await_failure(0):
            if all(_has_come(said, sequence) for said in statements.values()):
                return
            time.sleep(_ARRIVAL_PAUSE)
            statements.update(self._ask(secrets.token_hex(8), sequence, None))

    def _ask(self, ticket: str, sequence: int, doubtful: int | None) -> dict[int, dict[str, Any]]:
        """Return the statements of the members that answer in time, by global rank.

        ``doubtful`` is a rank that is probably gone; it gets less time.
        """
        group, fate = self._group, self._fate
        query = {"kind": "query", "group": group.id, "sequence": sequence, "ticket": ticket}
        publish(self._store, query)
        deadline = Deadline.after(ANSWER_SECONDS)
        found: dict[int, dict[str, Any]] = {}
        departed = fate.departed
        for rank in group.ranks:
            if fate.await_failure(0):
                break
            if rank in departed:
                if (said := _last_calls(self._store, rank, group.id)) is not None:
                    found[rank] = said
                continue
            grace = deadline.remaining()
            if rank == doubtful:
                grace = min(grace, DOUBTFUL_SECONDS)
            try:
                text = self._store.get(answer_key(ticket, rank), timeout=grace)
            except StoreTimeoutError:
                continue
            found[rank] = json.loads(text)
        return found


def answer_key(ticket: str, rank: int) -> str:
    """Return where ``rank`` answers the query ``ticket``."""
    return f"answer/{ticket}/{rank}"


def mismatch_message(
    group: Members,
    record: Record,
    error: HeaderMismatchError,
    statements: Mapping[int, Mapping[str, Any]],
) -> str:
    """Return the table of what each member called."""
    sequence = _first_difference(statements.values(), record.header.sequence)
    received = error.received
    noticed = f"noticed by rank {group.global_rank}: {error}"
    same = isinstance(received, CallHeader) and received.what == record.header.what
    if same and received != record.header:
        noticed = (
            f"noticed by rank {group.global_rank} in {record.header}: the members had made"
            " different calls before it"
        )
    rows: list[tuple[str, str, str]] = []
    for rank in group.ranks:
        said = statements.get(rank)
        call = _call_at(said, sequence) if said else None
        if call is not None:
            rows.append((str(rank), call["call"], call["site"]))
        elif rank == group.ranks[error.peer] and isinstance(received, CallHeader):
            rows.append((str(rank), str(received), "(from its message)"))
        else:
            rows.append((str(rank), "no such call yet" if said else "no answer", ""))
    return (
        f"the members of {group} made different calls (#{sequence} of this group)\n"
        f"{table(('rank', 'call', 'where'), rows)}\n"
        f"{noticed}"
    )


def timeout_message(
    group: Members, record: Record, statements: Mapping[int, Mapping[str, Any]]
) -> str:
    """Return who has not come to the call, and where each member stands."""
    sequence = record.header.sequence
    seconds = record.deadline.seconds if record.started else time.monotonic() - record.issued
    if record.peer >= 0:
        receiver = group.ranks[record.peer]
        return (
            f"{record.header} to rank {receiver} on {group} was not done after {seconds:g} s: "
            f"rank {receiver} did not receive it\n"
            + _where(receiver, statements.get(receiver), None, group.ranks)
        )
    missing = [r for r in group.ranks if not _has_come(statements.get(r), sequence)]
    who = (
        f"rank{'s' if len(missing) > 1 else ''} {_join(missing)} {_have(missing)} not come"
        if missing
        else "all ranks have come, but it did not finish"
    )
    return f"{record.header} on {group} was not done after {seconds:g} s: {who}\n" + "\n".join(
        _where(rank, statements.get(rank), sequence, group.ranks, missing) for rank in group.ranks
    )


def lost_message(
    group: Members,
    record: Record,
    error: PeerLostError,
    statements: Mapping[int, Mapping[str, Any]],
    departed: Sequence[int],
) -> str:
    """Return that a rank is gone (or has closed its end), and during what."""
    lost = group.ranks[error.peer]
    said = statements.get(lost)
    if record.peer == ANY_SOURCE:
        others = _join([rank for rank in group.ranks if rank != group.global_rank])
        what = f"all that could send have left {group} (ranks {others})"
    elif lost in departed:
        what = f"rank {lost} has left the job"
    elif said is None:
        what = f"rank {lost} is gone: its connection closed and it does not answer"
    else:
        what = (
            f"rank {lost} closed its connection but is alive (pid {said['pid']} on "
            f"{said['host']}): it has left {group} ({error})"
        )
    return f"{what}; rank {group.global_rank} noticed in {record.header} on {group}, {record.site}"


def _first_difference(statements: Iterable[Mapping[str, Any]], sequence: int) -> int:
    """Return the number of the first collective up to ``sequence`` that differs between ranks."""
    for number in range(max(1, sequence - CALLS_BEFORE), sequence):
        calls = [call for said in statements if (call := _call_at(said, number)) is not None]
        if len({CallHeader(*call["header"]).what for call in calls}) > 1:
            return number
    return sequence


def _has_come(said: Mapping[str, Any] | None, sequence: int) -> bool:
    return said is not None and said["reached"] >= sequence


def _call_at(said: Mapping[str, Any] | None, sequence: int) -> Mapping[str, Any] | None:
    """Return the collective number ``sequence`` from a statement, if the rank got so far."""
    if said is None:
        return None
    for call in reversed(said["calls"]):
        if call["sequence"] == sequence and call["peer"] == COLLECTIVE:
            return call
    return None


def _where(
    rank: int,
    said: Mapping[str, Any] | None,
    sequence: int | None,
    ranks: Sequence[int],
    missing: Sequence[int] = (),
) -> str:
    """Return where ``rank`` stands, in or before collective ``sequence`` (None: in none).

    ``ranks`` are the group's; ``missing`` those that have not come, for whom the others wait.
    """
    if said is None:
        return f"  rank {rank}: silent (no answer in {ANSWER_SECONDS:g} s: stopped or gone)"
    here = None if sequence is None else _call_at(said, sequence)
    lines = [f"  rank {rank} (pid {said['pid']} on {said['host']}):"]
    if here is None:
        if sequence is not None:
            lines.append("    has not come")
        lines += [
            f"    its last call here: {c['call']} ({c['state']}), {c['site']}"
            for c in said["calls"][-1:]
        ]
        lines += [f"    now in {c['call']} on {c['group']}, {c['site']}" for c in said["elsewhere"]]
    else:
        waits = here["waiting_for"]
        suffix = "" if waits is None else f", waits for rank {ranks[waits]}"
        # Whom it waits for may itself wait for another.
        if missing and (waits is None or ranks[waits] not in missing):
            suffix += f", misses rank{'s' if len(missing) > 1 else ''} {_join(missing)}"
        lines.append(f"    {here['call']} ({here['state']}{suffix}), {here['site']}")
    lines += [f"    | {line}" for line in said["stack"][-STACK_LINES:]]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return ``rows`` under ``head``, in aligned columns, indented by two."""
    lines = [head, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"
