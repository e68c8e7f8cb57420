"""The merged record as one HTML page: a lane a rank, waiting apart from moving."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from meshlib.trace.dump import RankDump
from meshlib.trace.merge import names_of_groups, spans, verdict

_PLACE = "/*DATA*/"


def page(dumps: Sequence[RankDump]) -> str:
    """Return the page: self-contained, with nothing loaded from elsewhere."""
    template = files("meshlib.trace").joinpath("timeline.html").read_text(encoding="utf-8")
    # "</" would end the script element that holds the data.
    data = json.dumps(page_data(dumps)).replace("</", "<\\/")
    return template.replace(_PLACE, data)


def page_data(dumps: Sequence[RankDump]) -> dict[str, Any]:
    """Return what the page draws: times in seconds from the first call on."""
    names = names_of_groups(dumps)
    calls: list[dict[str, Any]] = []
    for i, span in enumerate(spans(dumps)):
        call, one, remote = span.call, span.together, span.remote
        # What the views of one collective, or of one remote call, have in common.
        name = f"message {i}" if one is None else f"{call.group}#{call.sequence}"
        calls.append(
            {
                "id": name if remote is None else "#".join(map(str, remote)),
                "rank": call.rank,
                "kind": call.kind,
                "call": call.call,
                "group": names.get(call.group, call.group),
                "members": list(one.ranks)
                if one is not None
                else sorted({call.rank, *([] if remote is None else [call.peer])}),
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
