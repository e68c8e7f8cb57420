"""The merged record as one HTML page: a lane a rank, waiting apart from moving."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from meshlib.trace.chains import key_of
from meshlib.trace.dump import CallDump, RankDump
from meshlib.trace.merge import collectives, verdict

_PLACE = "/*DATA*/"


def page(dumps: Sequence[RankDump]) -> str:
    """Return the page: self-contained, with nothing loaded from elsewhere."""
    template = files("meshlib.trace").joinpath("timeline.html").read_text(encoding="utf-8")
    # "</" would end the script element that holds the data.
    data = json.dumps(page_data(dumps)).replace("</", "<\\/")
    return template.replace(_PLACE, data)


def _id(call: CallDump) -> str:
    """Return what the views of one collective, or of one remote call, have in common."""
    key = key_of(call)
    return f"{call.group}#{call.sequence}" if key is None else "#".join(map(str, key))


def page_data(dumps: Sequence[RankDump]) -> dict[str, Any]:
    """Return what the page draws: times in seconds from the first call on."""
    everything = [call for dump in dumps for call in dump.calls]
    origin = min((call.issued for call in everything), default=0.0)
    end = max((max(c.ended, c.started, c.issued) for c in everything), default=0.0) - origin
    names = {key: desc or key for dump in dumps for key, (desc, _) in dump.groups.items()}
    together = {(one.group, one.sequence): one for one in collectives(dumps)}
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(everything):
        one = together[call.group, call.sequence] if call.collective else None
        remote = key_of(call)
        begin = (call.started or call.issued) - origin
        stop = call.ended - origin if call.ended else end
        if one is None:
            ready = begin
        elif one.all_started:
            ready = min(max(one.all_started - origin, begin), stop)
        else:
            ready = stop
        calls.append(
            {
                "id": _id(call) if one is not None or remote is not None else f"message {i}",
                "rank": call.rank,
                "kind": call.kind,
                "call": call.call,
                "group": names.get(call.group, call.group),
                "members": list(one.ranks)
                if one is not None
                else sorted({call.rank, *([] if remote is None else [call.peer])}),
                "begin": begin,
                "ready": ready,
                "end": stop,
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
