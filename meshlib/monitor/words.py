"""A job in words and plain values: one sentence, and what pages and terminals draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from meshlib import plain_text
from meshlib.monitor.view import JobView, RankView, State

_PREFIXES = ("", "k", "M", "G", "T", "P")
_VERBS = {
    State.ABSENT: ("has not come", "have not come"),
    State.SILENT: ("says nothing", "say nothing"),
    State.LOST: ("was lost", "were lost"),
}
"""What ranks in a state have done, one of them and several, in the order in which it is said."""


named: partial[str] = partial(plain_text.named, most=8)


def headline(view: JobView, now: float) -> str:
    """Return, in a sentence or two, how the job is and whose fault that is."""
    if view.over is not None:
        return f"Over: {view.over}."
    by_state: dict[str, list[int]] = {}
    for one in view.ordered():
        by_state.setdefault(one.state(now), []).append(one.rank)
    if not by_state:
        return "No rank has come so far."
    if by_state.keys() == {State.LEFT}:
        return "All ranks have left in good order."
    said = [_do(ranks, *verb) for state, verb in _VERBS.items() if (ranks := by_state.get(state))]
    if waiting := by_state.get(State.WAITING):
        awaited = _awaited(view, waiting)
        said.append(_do(waiting, "waits", "wait") + (f" for {named(awaited)}" if awaited else ""))
    elif slow := view.stragglers:
        said.append(
            f"{_do([one.rank for one in slow], 'keeps', 'keep')} the others waiting:"
            f" {percent(slow[0].own)} of the time outside of calls, the others"
            f" {percent(slow[0].others)}"
        )
    there = len(view.there(now))
    spares = by_state.get(State.SPARE, [])
    ready = f", {len(spares)} ready to come" if spares else ""
    running = f"{there} {'rank is' if there == 1 else 'ranks are'} there{ready}"
    text = "; ".join([running, *said])
    return text[0].upper() + text[1:] + "."


def _do(ranks: Sequence[int], one: str, several: str) -> str:
    return f"{named(ranks)} {several if len(ranks) > 1 else one}"


def _awaited(view: JobView, waiting: Sequence[int]) -> list[int]:
    """Return whom those who wait, wait for, and who does not wait."""
    found: set[int] = set()
    for rank in waiting:
        sample = view.ranks[rank].sample
        for call in sample.open_calls if sample is not None else ():
            if call.waiting_for is not None:
                found.add(call.waiting_for)
    return sorted(found - set(waiting))


def percent(share: float) -> str:
    """Return ``45 %``."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Return ``1.5 ms``, or a dash for no time at all."""
    if seconds <= 0:
        return "–"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def rate(nbytes: float) -> str:
    """Return ``1.2 MB/s``, a thousand bytes being a kB."""
    for prefix in _PREFIXES:
        if nbytes < 999.5 or prefix == _PREFIXES[-1]:
            return f"{nbytes:.3g} {prefix}B/s"
        nbytes /= 1000
    raise AssertionError


def as_values(view: JobView, now: float) -> dict[str, Any]:
    """Return all that a page draws, as values of JSON."""
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
    values: dict[str, Any] = {
        "rank": view.rank,
        "state": view.state(now),
        "slow": slow,
        "how": view.how,
        "step": view.step,
        "inside": view.smooth.inside,
        "heard": view.heard,
        "host": "",
        "pid": 0,
        "total": 0,
        "place": -1,
        "epoch": -1,
        "mesh": [],
        "calls": [],
    }
    if sample is not None:
        values |= {
            "host": sample.host,
            "pid": sample.pid,
            "total": sample.total,
            "place": sample.place,
            "epoch": sample.epoch,
            "mesh": [asdict(one) for one in sample.mesh],
            "calls": [asdict(call) for call in sample.open_calls],
        }
    return values
