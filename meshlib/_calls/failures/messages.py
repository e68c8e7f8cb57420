"""The error messages of a failed call; all members raise the same one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from meshlib._calls.failures.statements import CALLS_BEFORE, Statement
from meshlib._calls.members import Members
from meshlib._plain_text import columns, have, named
from meshlib._recording.recorder import ANY_SOURCE, Record
from transport._calls.header import CallHeader
from transport._errors import DistError, HeaderMismatchError, PeerLostError, StoreSilentError
from transport._net.reach import is_out_of_reach

ANSWER_SECONDS = 0.5
"""The time that a reporter waits for statements. A busy rank answers from its watcher thread; only
a stopped, dead or stuck rank stays silent."""
STACK_LINES = 12


def mismatch_message(
    group: Members,
    record: Record,
    error: HeaderMismatchError,
    statements: Mapping[int, Statement],
) -> str:
    """Return the table of the members' calls."""
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
        statement = statements.get(rank)
        call = statement.call_at(sequence) if statement else None
        if call is not None:
            rows.append((str(rank), str(call), call.site))
        elif rank == group.ranks[error.peer] and isinstance(received, CallHeader):
            rows.append((str(rank), str(received), "(from its message)"))
        else:
            rows.append((str(rank), "no such call yet" if statement else "no answer", ""))
    return (
        f"the members of {group} made different calls (#{sequence} of this group)\n"
        f"{table(('rank', 'call', 'where'), rows)}\n"
        f"{noticed}"
    )


def timeout_message(group: Members, record: Record, statements: Mapping[int, Statement]) -> str:
    """Return a message with the call's missing members and the state of each member."""
    sequence = record.header.sequence
    seconds = record.deadline.seconds if record.started else time.monotonic() - record.issued
    if record.peer >= 0:
        receiver = group.ranks[record.peer]
        return (
            f"{record.header} to rank {receiver} on {group} did not complete within {seconds:g} s: "
            f"rank {receiver} did not receive it\n"
            + _where(receiver, statements.get(receiver), None)
        )
    arrived = {rank for rank, statement in statements.items() if statement.has_arrived(sequence)}
    missing = [rank for rank in group.ranks if rank not in arrived]
    who = (
        f"{named(missing)} {have(missing)} not arrived"
        if missing
        else "all ranks have arrived, but the call did not finish"
    )
    return f"{record.header} on {group} did not complete within {seconds:g} s: {who}\n" + "\n".join(
        _where(rank, statements.get(rank), sequence, missing) for rank in group.ranks
    )


def lost_message(
    group: Members,
    record: Record,
    error: PeerLostError,
    statements: Mapping[int, Statement],
    departed: Sequence[int],
) -> str:
    """Return a message about a rank that is gone or has closed its connection during a call."""
    lost = group.ranks[error.peer]
    statement = statements.get(lost)
    if record.peer == ANY_SOURCE:
        others = named([rank for rank in group.ranks if rank != group.global_rank])
        what = f"all possible senders have left {group} ({others})"
    elif lost in departed:
        what = f"rank {lost} has left the job"
    elif statement is None and error.unreachable:
        what = f"rank {lost} cannot be reached and does not answer: {error}"
    elif statement is None:
        what = f"rank {lost} is gone: its connection closed and it does not answer"
    else:
        what = (
            f"rank {lost} closed its connection but is alive"
            f" (pid {statement.pid} on {statement.host}): it has left {group} ({error})"
        )
    return f"{what}; rank {group.global_rank} noticed in {record.header} on {group}, {record.site}"


def end_of_server(error: DistError | None) -> str:
    """Return the end of a message about the rank that served the store: "rank 0 …".

    ``error`` ended the connection to the store. Peers cannot tell a dead host from an unreachable
    one.
    """
    if isinstance(error, StoreSilentError) or is_out_of_reach(getattr(error, "__cause__", None)):
        return f"cannot be reached, and neither can the store that it serves: {error}"
    return "is gone, and with it the store that it served"


def _first_difference(statements: Iterable[Statement], sequence: int) -> int:
    """Return the number of the first collective up to ``sequence`` that differs between ranks."""
    for number in range(max(1, sequence - CALLS_BEFORE), sequence):
        calls = [
            call for statement in statements if (call := statement.call_at(number)) is not None
        ]
        if len({call.header.what for call in calls}) > 1:
            return number
    return sequence


def _where(
    rank: int,
    statement: Statement | None,
    sequence: int | None,
    missing: Sequence[int] = (),
) -> str:
    """Return the state of ``rank`` in or before the collective ``sequence``, if any.

    ``missing`` are the members that have not arrived.
    """
    if statement is None:
        return (
            f"  rank {rank}: silent (no answer in {ANSWER_SECONDS:g} s: stopped, gone or cut off)"
        )
    here = None if sequence is None else statement.call_at(sequence)
    lines = [f"  rank {rank} (pid {statement.pid} on {statement.host}):"]
    if here is None:
        if sequence is not None:
            lines.append("    has not arrived")
        lines += [
            f"    its last call here: {c} ({c.state}), {c.site}" for c in statement.calls[-1:]
        ]
        lines += [f"    now in {c} on {c.group}, {c.site}" for c in statement.elsewhere]
    else:
        waits = here.waiting_for
        suffix = "" if waits is None else f", waits for rank {waits}"
        # The awaited rank may itself be blocked.
        if missing and waits not in missing:
            suffix += f", misses {named(missing)}"
        lines.append(f"    {here} ({here.state}{suffix}), {here.site}")
    lines += [f"    | {line}" for line in statement.stack[-STACK_LINES:]]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return ``rows`` under ``head``, in columns columns, indented by two."""
    return "\n".join(f"  {line}" for line in columns([head, *rows]))
