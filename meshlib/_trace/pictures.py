"""The merged record as pictures: an HTML page of our own, and a trace for Perfetto.

The page has a row for each rank, and shows waiting apart from moving. The trace has the JSON object
form of the Trace Event Format, for Perfetto or chrome://tracing. There a process is a rank, a
thread is a group, an ``X`` event is a call (microseconds), split into waiting for the last member
and moving. Flow events (``s``, ``f``) tie the members' views of one collective together.
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
    """Return the page: self-contained, with nothing loaded from elsewhere."""
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
        # One name for all views of one collective, or of one remote call.
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
    lanes = {group: i for i, group in enumerate(sorted({one.call.group for one in every}))}
    names = names_of_groups(dumps)
    events: list[dict[str, Any]] = []
    for dump in dumps:
        title = f"rank {dump.rank} ({dump.host}, pid {dump.pid})"
        events.append(_meta("process_name", dump.rank, 0, name=title))
        events.append(_meta("process_sort_index", dump.rank, 0, sort_index=dump.rank))
        for group, lane in lanes.items():
            events.append(_meta("thread_name", dump.rank, lane, name=names.get(group, group)))
    for one in every:
        call, lane = one.call, lanes[one.call.group]
        base = {"pid": one.rank, "tid": lane, "cat": call.kind, "args": _details(call)}
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
                    "tid": lane,
                    "ts": _micros(one.begin),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(kind: str, rank: int, lane: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": args}


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
