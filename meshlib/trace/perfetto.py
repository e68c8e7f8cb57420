"""The merged record as a trace for Perfetto or chrome://tracing.

Format: the Trace Event Format's JSON object form; a process is a rank, a thread a group, an ``X``
event a call (microseconds), split into waiting for the last member and moving; flow events
(``s``, ``f``) tie the members' views of one collective together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshlib.trace.chains import key_of
from meshlib.trace.dump import CallDump, RankDump
from meshlib.trace.merge import collectives


def trace(dumps: Sequence[RankDump]) -> dict[str, Any]:
    """Return the trace of ``dumps``, ready for ``json.dump``."""
    calls = [call for dump in dumps for call in dump.calls]
    origin = min((call.issued for call in calls), default=0.0)
    end = max((max(call.ended, call.started, call.issued) for call in calls), default=0.0)
    lanes = {group: i for i, group in enumerate(sorted({call.group for call in calls}))}
    names = {key: desc or key for dump in dumps for key, (desc, _) in dump.groups.items()}
    events: list[dict[str, Any]] = []
    for dump in dumps:
        title = f"rank {dump.rank} ({dump.host}, pid {dump.pid})"
        events.append(_meta("process_name", dump.rank, 0, title))
        events.append({**_meta("process_sort_index", dump.rank, 0, ""), "args": _sort(dump.rank)})
        for group, lane in lanes.items():
            events.append(_meta("thread_name", dump.rank, lane, names.get(group, group)))
    together = {(one.group, one.sequence): one for one in collectives(dumps)}
    for call in calls:
        one = together.get((call.group, call.sequence)) if call.collective else None
        ready = one.all_started if one is not None else 0.0
        lane = lanes[call.group]
        begin = call.started or call.issued
        stop = call.ended or end
        moving = min(max(ready, begin), stop) if ready else (begin if one is None else stop)
        base = {"pid": call.rank, "tid": lane, "cat": call.kind, "args": _details(call)}
        if moving > begin:
            waiting = {**base, "cat": "waiting", "name": f"wait: {call.kind}"}
            events.append({**waiting, "ph": "X", **_span(begin, moving, origin)})
        if stop > moving:
            events.append({**base, "name": call.kind, "ph": "X", **_span(moving, stop, origin)})
        remote = key_of(call)
        if remote is not None or (one is not None and len(one.calls) > 1):
            first = remote[1] if remote is not None else min(one.calls if one else ())
            events.append(
                {
                    "ph": "s" if call.rank == first else "f",
                    "bp": "e",
                    "id": "#".join(map(str, remote or (call.group, call.sequence))),
                    "name": call.kind,
                    "cat": "collective" if remote is None else "call",
                    "pid": call.rank,
                    "tid": lane,
                    "ts": _micros(begin, origin),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(name: str, rank: int, lane: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": lane, "args": {"name": value}}


def _sort(rank: int) -> dict[str, int]:
    return {"sort_index": rank}


def _span(begin: float, end: float, origin: float) -> dict[str, float]:
    return {"ts": _micros(begin, origin), "dur": round((end - begin) * 1e6, 3)}


def _micros(moment: float, origin: float) -> float:
    return round((moment - origin) * 1e6, 3)


def _details(call: CallDump) -> dict[str, Any]:
    return {
        "call": call.call,
        "group": call.group,
        "bytes": call.nbytes,
        "where": call.site,
        "state": call.state,
        "error": call.error,
    }
