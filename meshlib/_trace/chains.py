"""Chains of remote calls over workers, from the ranks' dumps: each call waits for the next.

A call has a record at its caller and one at its callee, with the caller's rank and number. If one
of the two was killed and left no record, the other record suffices. A record names the call whose
function made it, so that chains continue past workers without records.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshlib._recording.call_report import CallReport
from meshlib._trace.dump import RankDump, first_line
from transport._calls.header import Kind

Key = tuple[str, int, int]
"""The key of a call: the group of workers, the caller's rank, and its number for the call."""
MOST_LINES = 40


@dataclass
class RemoteCall:
    """One call: its ``caller`` and ``callee`` with their records, and the key of its parent."""

    caller: int
    callee: int
    parent: Key | None = None
    made: CallReport | None = None
    served: CallReport | None = None
    calls: list[RemoteCall] = field(default_factory=list["RemoteCall"])
    """The calls that the call's function made."""

    @property
    def function(self) -> str:
        """The function's name; that of a method only if the callee has a record."""
        names = [view.kind for view in (self.served, self.made) if view is not None]
        return next((one for one in names if not one.startswith(("?", "meshlib."))), "a function")

    def is_open(self, recorded: Container[int]) -> bool:
        """Return whether the call had not ended on one side, or failed without the other's record.

        ``recorded`` are the ranks that left records.
        """
        ends = (self.made, self.callee), (self.served, self.caller)
        return any(
            not view.ended or (view.error is not None and other not in recorded)
            for view, other in ends
            if view is not None
        )

    @property
    def since(self) -> float:
        """The earliest known time of the call, 0 if unknown."""
        times = [view.issued for view in (self.made, self.served) if view is not None]
        return min(times, default=0.0)


def key_of(rank: int, call: CallReport) -> Key | None:
    """Return the key of the remote call that ``rank`` made or served; None for other calls."""
    if not call.remote:
        return None
    caller = rank if call.header.kind == Kind.CALL else call.peer
    return call.group, caller, call.sequence


def remote_calls(dumps: Sequence[RankDump]) -> list[RemoteCall]:
    """Return the calls without a known parent, oldest first; others are in their parents."""
    found: dict[Key, RemoteCall] = {}
    for rank, call in ((dump.rank, call) for dump in dumps for call in dump.calls):
        key, header = key_of(rank, call), call.header
        if key is None:
            continue
        if header.kind == Kind.CALL:
            found.setdefault(key, RemoteCall(rank, call.peer)).made = call
        else:
            found.setdefault(key, RemoteCall(call.peer, rank)).served = call
        if header.root >= 0:
            found[key].parent = call.group, header.root, header.elements
    for one in list(found.values()):
        if one.parent is not None and one.parent not in found:  # neither side left a record
            found[one.parent] = RemoteCall(one.parent[1], one.caller)
    roots: list[RemoteCall] = []
    for one in sorted(found.values(), key=lambda one: one.since):
        above = None if one.parent is None else found.get(one.parent)
        (roots if above is None else above.calls).append(one)
    return roots


def describe(dumps: Sequence[RankDump]) -> str:
    """Return the chains of calls that had not ended; an empty string if there is none.

    Each call has a line, indented under the call whose function made it.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    names: dict[int, str] = {}
    for dump in dumps:
        names.update(enumerate(dump.workers))
    lines: list[str] = []
    for root in remote_calls(dumps):
        lines += _lines(root, 1, by_rank, names)
    if not lines:
        return ""
    more = len(lines) - MOST_LINES
    rest = [f"  … and {more} more"] if more > 0 else []
    return "\n".join(["Calls that had not ended:", *lines[:MOST_LINES], *rest])


def _lines(
    call: RemoteCall, depth: int, dumps: Mapping[int, RankDump], names: Mapping[int, str]
) -> Iterator[str]:
    below = [line for one in call.calls for line in _lines(one, depth + 1, dumps, names)]
    if call.is_open(dumps) or below:
        caller, callee = _who(call.caller, names), _who(call.callee, names)
        indent = "  " * depth
        site = "" if call.made is None else f", at {call.made.site}"
        yield f"{indent}{caller}{_waits(call, dumps)} {call.function} on {callee}{site}"
        yield from below
        if not below:
            yield f"{indent}  {callee} {_does(call, dumps)}"


def _waits(call: RemoteCall, dumps: Mapping[int, RankDump]) -> str:
    made = call.made
    if made is None:
        return " had called" if call.caller in dumps else " has left no record, and had called"
    if made.ended:
        return f" gave up after {made.ended - made.issued:.1f} s{_reason(made.error)} waiting for"
    return f" has waited {dumps[call.caller].written - made.issued:.1f} s for"


def _does(call: RemoteCall, dumps: Mapping[int, RankDump]) -> str:
    served, dump = call.served, dumps.get(call.callee)
    if dump is None:
        return "has left no record"
    if served is None:
        return "has no record of the call"
    if served.ended:
        return f"has ended it{_reason(served.error)}"
    if not served.started:
        return f"has not begun it, {dump.written - served.issued:.1f} s after it arrived"
    where = f": {served.site}" if served.site else ""
    return f"has run it for {dump.written - served.started:.1f} s{where}"


def _reason(error: str | None) -> str:
    return f" ({first_line(error)})" if error else ""


def _who(rank: int, names: Mapping[int, str]) -> str:
    return f"rank {rank} ({names[rank]})" if rank in names else f"rank {rank}"
