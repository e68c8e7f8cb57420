"""Merging of the ranks' dumps: matching calls, and the cause of a failure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshlib._plain_text import named
from meshlib._recording.call_report import CallReport
from meshlib._trace.chains import Key, describe, key_of
from meshlib._trace.dump import RankDump, first_line

# The messages about a rank's end: the rank's own, and other ranks' (see ``RankLost``).
_ENDED = re.compile(r"(?:ended with|raised) .*")
_LOST = re.compile(
    r"rank (\d+) ((?:ended with|raised|was killed|was lost|is gone|cannot be reached|has left"
    r"|closed its)\b.*)"
)


@dataclass(frozen=True)
class Collective:
    """One collective of one group, with the members' records."""

    group: str
    description: str
    sequence: int
    ranks: tuple[int, ...]
    calls: Mapping[int, CallReport]
    """The members' records, by global rank."""

    @property
    def missing(self) -> list[int]:
        """The members without a record of the collective."""
        return [rank for rank in self.ranks if rank not in self.calls]

    @property
    def mismatched(self) -> bool:
        """True if the recorded members did not all make the same call."""
        return len({call.header for call in self.calls.values()}) > 1

    @property
    def all_started(self) -> float:
        """The start of the last member, until which the others waited; 0 if one never started."""
        starts = [call.started for call in self.calls.values()]
        return max(starts) if not self.missing and all(starts) else 0.0

    @property
    def last(self) -> int:
        """The recorded member that started last."""
        return max(self.calls, key=lambda rank: self.calls[rank].started or self.calls[rank].issued)


def collectives(dumps: Sequence[RankDump]) -> list[Collective]:
    """Return the collectives in ``dumps``, in the order of their first member's call."""
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    found: dict[tuple[str, int], dict[int, CallReport]] = defaultdict(dict)
    for dump in dumps:
        groups.update(dump.groups)
        for call in dump.calls:
            if call.collective:
                found[call.group, call.sequence][dump.rank] = call
    merged = [
        Collective(
            group,
            groups.get(group, ("", ()))[0] or group,
            sequence,
            groups.get(group, ("", tuple(calls)))[1],
            calls,
        )
        for (group, sequence), calls in found.items()
    ]
    return sorted(merged, key=lambda c: min(call.issued for call in c.calls.values()))


@dataclass(frozen=True)
class CallSpan:
    """The time of one call of ``rank``: it waits from ``begin`` to ``ready``, then runs to ``end``.

    ``together`` is the collective of the call, ``remote`` the key of a remote call, or None.
    """

    rank: int
    call: CallReport
    begin: float
    ready: float
    end: float
    together: Collective | None
    remote: Key | None


def spans(dumps: Sequence[RankDump]) -> list[CallSpan]:
    """Return all calls, with times in seconds since the first; open calls last to the end."""
    calls = [(dump.rank, call) for dump in dumps for call in dump.calls]
    origin = min((call.issued for _, call in calls), default=0.0)
    last = max((max(call.ended, call.started, call.issued) for _, call in calls), default=0.0)
    merged = {(one.group, one.sequence): one for one in collectives(dumps)}
    found: list[CallSpan] = []
    for rank, call in calls:
        one = merged[call.group, call.sequence] if call.collective else None
        begin, end = (call.started or call.issued) - origin, (call.ended or last) - origin
        if one is None:
            ready = begin
        elif one.all_started:
            ready = min(max(one.all_started - origin, begin), end)
        else:
            ready = end
        found.append(CallSpan(rank, call, begin, ready, end, one, key_of(rank, call)))
    return found


def names_of_groups(dumps: Sequence[RankDump]) -> dict[str, str]:
    """Return the names of the groups by their ids."""
    return {key: desc or key for dump in dumps for key, (desc, _) in dump.groups.items()}


def verdict(dumps: Sequence[RankDump]) -> str:
    """Return one or two sentences: the cause of the failure, and the rank that failed first."""
    absent = sorted(set(range(dumps[0].size)) - {dump.rank for dump in dumps})
    return _cause(dumps) + (f" There is no record of {named(absent)}." if absent else "")


def _cause(dumps: Sequence[RankDump]) -> str:
    merged = collectives(dumps)
    for one in merged:
        if one.mismatched:
            alike: dict[tuple[str, str], list[int]] = defaultdict(list)
            for rank, call in sorted(one.calls.items()):
                alike[str(call), call.site].append(rank)
            views = "; ".join(
                f"{named(ranks)} made {call} at {site}" for (call, site), ranks in alike.items()
            )
            where = f"at #{one.sequence}: {views}."
            return f"The members of {one.description} made different calls {where}"
    ended = _ended(dumps)
    if ended is not None:
        rank, how = ended
        return f"Rank {rank} {how}.{_doing(dumps, [rank])}"
    stuck = [one for one in merged if any(call.state != "done" for call in one.calls.values())]
    for one in stuck:
        # A member with later calls did make this one, but its ring has dropped the record.
        missing = [rank for rank in one.missing if not _went_past(dumps, rank, one)]
        elsewhere = [other for other in stuck if _wait_for_each_other(one, other)]
        if missing and elsewhere:
            views = "; ".join(
                f"{named(sorted(each.calls))} in {call} on {each.description} at {call.site}"
                for each in (one, elsewhere[0])
                for call in [each.calls[min(each.calls)]]
            )
            return f"Ranks waited for each other in different calls: {views}."
        if missing:
            first, call = min(one.calls.items(), key=lambda item: item[1].issued)
            return (
                f"{named(missing).capitalize()} never reached {call} on {one.description}; "
                f"the first to wait was rank {first}, at {call.site}."
                f"{_doing(dumps, missing)}"
            )
    failed = sorted((dump for dump in dumps if dump.error), key=lambda dump: dump.written)
    if failed:
        return f"Rank {failed[0].rank} was the first to fail: {first_line(failed[0].error)}."
    if stuck:
        one = stuck[0]
        call = next(call for call in one.calls.values() if call.state != "done")
        return f"{call} on {one.description} began on all members and did not end."
    keys = {key_of(dump.rank, call) for dump in dumps for call in dump.calls if call.remote}
    also = f" and {len(keys)} remote calls" if keys and not describe(dumps) else ""
    return f"All {len(merged)} collectives{also} in the records ended well."


def _ended(dumps: Sequence[RankDump]) -> tuple[int, str] | None:
    """Return the rank that ended before the others raised, and how it ended; None without one."""
    for dump in sorted(dumps, key=lambda dump: dump.written):
        if _ENDED.match(first_line(dump.error)):
            return dump.rank, first_line(dump.error)
    for dump in dumps:
        lost = _LOST.match(first_line(dump.error))
        if lost is not None:
            return int(lost[1]), lost[2]
    return None


def _went_past(dumps: Sequence[RankDump], rank: int, one: Collective) -> bool:
    calls = next((dump.calls for dump in dumps if dump.rank == rank), ())
    return any(call.group == one.group and call.sequence > one.sequence for call in calls)


def _wait_for_each_other(one: Collective, other: Collective) -> bool:
    """Return whether members that made either call are missing in the other."""
    return (
        one is not other
        and not set(one.missing).isdisjoint(other.calls)
        and not set(other.missing).isdisjoint(one.calls)
    )


def _doing(dumps: Sequence[RankDump], ranks: Sequence[int]) -> str:
    parts: list[str] = []
    for dump in dumps:
        if dump.rank in ranks and dump.calls:
            last = dump.calls[-1]
            on = dump.groups.get(last.group, ("", ()))[0] or last.group
            parts.append(
                f" Rank {dump.rank}'s last call was {last} on {on} ({last.state}), {last.site}."
            )
    return "".join(parts)
