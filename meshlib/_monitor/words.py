"""A job as text and plain values: a headline, and the data for pages and terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from meshlib import _plain_text as plain_text
from meshlib._diagnosis.sampling.sample import Sample
from meshlib._monitor.view import JobView, RankView, State
from meshlib._recording.call_report import CallReport

_PREFIXES = ("", "k", "M", "G", "T", "P")
_VERBS = {
    State.ABSENT: ("has not joined", "have not joined"),
    State.SILENT: ("is silent", "are silent"),
    State.LOST: ("was lost", "were lost"),
}
"""The verbs for one rank and for several ranks in a state, in the order of the headline."""


named: partial[str] = partial(plain_text.named, most=8)


def headline(view: JobView, now: float) -> str:
    """Return a sentence with the state of the job and the ranks that cause it."""
    if view.over is not None:
        return f"Over: {view.over}."
    by_state: dict[str, list[int]] = {}
    for one in view.ordered():
        by_state.setdefault(one.state(now), []).append(one.rank)
    if not by_state:
        return "No rank has joined yet."
    if by_state.keys() == {State.LEFT}:
        return "All ranks have left in good order."
    parts = [_do(ranks, *verb) for state, verb in _VERBS.items() if (ranks := by_state.get(state))]
    if waiting := by_state.get(State.WAITING):
        awaited = _awaited(view, waiting)
        parts.append(_do(waiting, "waits", "wait") + (f" for {named(awaited)}" if awaited else ""))
    elif slow := view.stragglers:
        parts.append(
            f"{_do([one.rank for one in slow], 'keeps', 'keep')} the others waiting:"
            f" {percent(slow[0].own)} of the time outside of calls, the others"
            f" {percent(slow[0].others)}"
        )
    there = len(view.there(now))
    spares = by_state.get(State.SPARE, [])
    ready = f", {len(spares)} ready to join" if spares else ""
    running = f"{there} {'rank is' if there == 1 else 'ranks are'} present{ready}"
    text = "; ".join([running, *parts])
    return text[0].upper() + text[1:] + "."


def _do(ranks: Sequence[int], one: str, several: str) -> str:
    return f"{named(ranks)} {several if len(ranks) > 1 else one}"


def _awaited(view: JobView, waiting: Sequence[int]) -> list[int]:
    """Return the ranks that ``waiting`` ranks wait for and that are not waiting themselves."""
    found: set[int] = set()
    for rank in waiting:
        sample = view.ranks[rank].sample
        for call in sample.open_calls if sample is not None else ():
            if call.waiting_for is not None:
                found.add(call.waiting_for)
    return sorted(found - set(waiting))


def percent(share: float) -> str:
    """Return ``share`` (0 to 1) as text such as ``45 %``."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Return ``seconds`` as text such as ``1.5 ms``, or a dash for 0."""
    if seconds <= 0:
        return "–"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def rate(nbytes: float) -> str:
    """Return ``nbytes`` per second as text such as ``1.2 MB/s``, with 1 kB as 1000 bytes."""
    for prefix in _PREFIXES:
        if nbytes < 999.5 or prefix == _PREFIXES[-1]:
            return f"{nbytes:.3g} {prefix}B/s"
        nbytes /= 1000
    raise AssertionError


def as_values(view: JobView, now: float) -> dict[str, Any]:
    """Return the page's data, as JSON values."""
    slow = view.slow
    return {
        "name": view.name,
        "now": now,
        "headline": headline(view, now),
        "over": view.over is not None,
        "epoch": view.epoch,
        "committed": view.committed,
        "dims": [asdict(dim) for dim in view.dims],
        "ranks": [_rank(one, now, one.rank in slow) for one in view.ordered()],
        "notes": [asdict(note) for note in view.notes],
        "history": [asdict(moment) for moment in view.history],
    }


def _rank(view: RankView, now: float, slow: bool) -> dict[str, Any]:
    sample = view.sample
    calls = () if sample is None else sample.open_calls
    return {
        "rank": view.rank,
        "state": view.state(now),
        "slow": slow,
        "how": view.how,
        "step": view.step,
        "inside": view.smooth.inside,
        "sampled_at": view.sampled_at,
        "host": "" if sample is None else sample.host,
        "pid": 0 if sample is None else sample.pid,
        "total": 0 if sample is None else sample.total,
        "place": -1 if sample is None else sample.place,
        "epoch": -1 if sample is None else sample.epoch,
        "mesh": [] if sample is None else [asdict(one) for one in sample.mesh],
        "calls": [_call(sample, call) for call in calls if sample is not None],
    }


def _call(sample: Sample, call: CallReport) -> dict[str, Any]:
    return {
        "call": str(call).removeprefix("call "),
        "group": sample.name_of(call.group),
        "seconds": sample.age(call),
        "waiting_for": call.waiting_for,
        "site": call.site,
    }
