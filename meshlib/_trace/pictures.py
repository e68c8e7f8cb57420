"""The merged record as pictures: an HTML page, and a trace for Perfetto.

The page has a row for each rank, and separates waiting from moving data. The trace has the JSON
object form of the Trace Event Format, for Perfetto or chrome://tracing. In it, a process is a rank,
a thread is a group, and ``X`` events (microseconds) are calls, split into waiting for the last
member and moving data. Flow events (``s``, ``f``) connect the members' calls of one collective.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from meshlib._recording.call_report import CallReport
from meshlib._trace.dump import RankDump
from meshlib._trace.merge import names_of_groups, spans, verdict

_PLACE = "/*DATA*/"


def page(dumps: Sequence[RankDump]) -> str:
    """Return the page, which is self-contained."""
    template = files("meshlib._trace").joinpath("timeline.html").read_text(encoding="utf-8")
    # "</" would end the script element that holds the data.
    data = json.dumps(page_data(dumps)).replace("</", "<\\/")
    return template.replace(_PLACE, data)


def page_data(dumps: Sequence[RankDump]) -> dict[str, Any]:
    """Return the page's data: times in seconds since the first call."""
    names = names_of_groups(dumps)
    calls: list[dict[str, Any]] = []
    for i, span in enumerate(spans(dumps)):
        call, one, remote = span.call, span.together, span.remote
        # All members' calls of one collective, or both sides of a remote call, share a name.
        name = f"message {i}" if one is None else f"{call.group}#{call.sequence}"
        calls.append(
            {
                "id": name if remote is None else "#".join(map(str, remote)),
                "rank": span.rank,
                "kind": call.kind,
                "call": str(call),
                "group": names.get(call.group, call.group),
                "members": list(one.ranks)
                if one is not None
                else sorted({span.rank, *([] if remote is None else [call.peer])}),
                "begin": span.begin,
                "ready": span.ready,
                "end": span.end,
                "bytes": call.nbytes,
                "state": call.state,
                "bad": call.state != "done" or (one is not None and one.mismatched),
                "site": call.site,
            }
        )
    recorded = [dump.rank for dump in dumps]
    return {
        "verdict": verdict(dumps),
        "ranks": sorted({*recorded, *range(dumps[0].size)}),
        "recorded": recorded,
        "calls": calls,
    }


def trace(dumps: Sequence[RankDump]) -> dict[str, Any]:
    """Return the trace of ``dumps``, ready for ``json.dump``."""
    every = spans(dumps)
    tracks = {group: i for i, group in enumerate(sorted({one.call.group for one in every}))}
    names = names_of_groups(dumps)
    events: list[dict[str, Any]] = []
    for dump in dumps:
        title = f"rank {dump.rank} ({dump.host}, pid {dump.pid})"
        events.append(_meta("process_name", dump.rank, 0, name=title))
        events.append(_meta("process_sort_index", dump.rank, 0, sort_index=dump.rank))
        for group, track in tracks.items():
            events.append(_meta("thread_name", dump.rank, track, name=names.get(group, group)))
    for one in every:
        call, track = one.call, tracks[one.call.group]
        base = {"pid": one.rank, "tid": track, "cat": call.kind, "args": _details(call)}
        if one.ready > one.begin:
            waiting = {**base, "cat": "waiting", "name": f"wait: {call.kind}"}
            events.append({**waiting, "ph": "X", **_span(one.begin, one.ready)})
        if one.end > one.ready:
            events.append({**base, "name": call.kind, "ph": "X", **_span(one.ready, one.end)})
        views = one.together.calls if one.together is not None else ()
        if one.remote is not None or len(views) > 1:
            first = one.remote[1] if one.remote is not None else min(views)
            events.append(
                {
                    "ph": "s" if one.rank == first else "f",
                    "bp": "e",
                    "id": "#".join(map(str, one.remote or (call.group, call.sequence))),
                    "name": call.kind,
                    "cat": "collective" if one.remote is None else "call",
                    "pid": one.rank,
                    "tid": track,
                    "ts": _micros(one.begin),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(kind: str, rank: int, track: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}


def _span(begin: float, end: float) -> dict[str, float]:
    return {"ts": _micros(begin), "dur": _micros(end - begin)}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _details(call: CallReport) -> dict[str, Any]:
    return {
        "call": str(call),
        "group": call.group,
        "bytes": call.nbytes,
        "where": call.site,
        "state": call.state,
        "error": call.error,
    }
