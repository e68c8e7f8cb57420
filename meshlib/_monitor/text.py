"""A job as lines of text, with optional colours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from meshlib._diagnosis.sampling.sample import Coordinate
from meshlib._monitor.view import JobView, RankView, State
from meshlib._monitor.words import duration, headline, percent, rate

_LOOKS = {
    State.COMPUTING: ("37;44", " "),
    State.CALLING: ("30;42", "c"),
    State.WAITING: ("30;43", "w"),
    State.SPARE: ("37;45", "+"),
    State.ABSENT: ("30;47", "?"),
    State.SILENT: ("37;100", "-"),
    State.LOST: ("37;41", "x"),
    State.LEFT: ("37;100", "."),
}
"""The ANSI colours of each state, and the mark after a rank's number for output without colours.
A straggler's mark is "!".
"""
_URGENT = (State.LOST, State.SILENT, State.ABSENT, State.WAITING)
_NOTES = 5
_BAR = 20
_MOST_ROWS = 16


def lines(view: JobView, now: float, width: int = 100, height: int = 40, *, paint: bool) -> str:
    """Return the job in at most ``height`` lines of ``width`` columns, in colours if ``paint``."""
    title = view.name or "job"
    facts = [
        f"{view.committed} steps" if view.committed >= 0 else "",
        f"epoch {view.epoch}" if view.epoch else "",
        time.strftime("%H:%M:%S", time.localtime(now)),
    ]
    rows = [f"{title}   {' · '.join(filter(None, facts))}", headline(view, now), ""]
    mesh = _mesh(view, now, width, paint)
    rows += [*mesh, ""] if mesh else []
    rows += [*_dims(view), ""] if view.dims else []
    notes = list(view.notes)[-_NOTES:]
    after = ["", *(_note(note.time, note.kind, note.text) for note in notes)] if notes else []
    rows += _ranks(view, now, max(3, height - len(rows) - len(after)))
    rows += after
    shown = [_cut(line, width) for line in rows[:height]]
    return "".join(f"{line}\n" for line in shown)


def _mesh(view: JobView, now: float, width: int, paint: bool) -> list[str]:
    """Return the ranks on the mesh: the last dim to the right, the one before it downwards."""
    digits = max((len(str(rank)) for rank in view.ranks), default=1)
    blocks: dict[tuple[Coordinate, ...], dict[tuple[int, int], RankView]] = {}
    heading, sizes = "", (0, 0)
    for one in view.ordered():
        mesh = one.sample.mesh if one.sample is not None else ()
        stale = one.ended is not None and one.sample is not None and one.sample.epoch < view.epoch
        if not mesh or stale:
            continue
        *outer, down, right = [Coordinate("", 0, 1), *mesh] if len(mesh) == 1 else mesh
        heading = f"{down.name} ↓  {right.name} →" if down.name else f"{right.name} →"
        sizes = max(sizes, (down.size, right.size))
        cells = blocks.setdefault(tuple(outer), {})
        if (held := cells.get((down.index, right.index))) is None or held.ended is not None:
            cells[down.index, right.index] = one
    if not blocks or sizes[0] > _MOST_ROWS or sizes[1] * (digits + 2) > width:
        return []
    rows: list[str] = []
    for outer, cells in list(blocks.items())[:_MOST_ROWS]:
        where = ", ".join(f"{one.name}={one.index}" for one in outer)
        rows.append("  ".join(filter(None, (where, heading))))
        for down in range(sizes[0]):
            row = [cells.get((down, right)) for right in range(sizes[1])]
            rows.append("  " + " ".join(_cell(view, one, now, digits, paint) for one in row))
    return rows


def _cell(view: JobView, one: RankView | None, now: float, digits: int, paint: bool) -> str:
    if one is None:
        return " " * (digits + 1)
    colours, mark = _LOOKS[one.state(now)]
    text = f"{one.rank:>{digits}}{'!' if one.rank in view.slow else mark}"
    return f"\x1b[{colours}m{text}\x1b[0m" if paint else text


def _dims(view: JobView) -> list[str]:
    rows = [f"{'dim':16} {'waiting':>8} {'moving':>8} {'bytes':>12} {'calls/s':>8}"]
    rows += [
        f"{dim.name[:16]:16} {percent(dim.waiting):>8} {percent(dim.inside - dim.waiting):>8}"
        f" {rate(dim.bandwidth):>12} {dim.calls:>8.0f}  {_bar(dim.waiting, dim.inside)}"
        for dim in view.dims[:8]
    ]
    return rows


def _ranks(view: JobView, now: float, most: int) -> list[str]:
    """Return one line per rank, ranks with problems first if not all fit."""
    slow = view.slow

    def urgency(one: RankView) -> tuple[bool, bool, int]:
        return one.state(now) not in _URGENT, one.rank not in slow, one.rank

    ranks = view.ordered()
    rows = [f"{'rank':>5} {'state':10} {'step':>9} {'in calls':>9}  calls under way"]
    shown = sorted(ranks, key=urgency)[: most - 2] if len(ranks) > most - 1 else ranks
    rows += [_rank(one, now, one.rank in slow) for one in shown]
    if len(shown) < len(ranks):
        rows.append(f"      and {len(ranks) - len(shown)} more")
    return rows


def _rank(one: RankView, now: float, slow: bool) -> str:
    state = one.state(now)
    head = f"{one.rank:>4}{'!' if slow else ' '} {state:10}"
    sample = one.sample
    if one.ended is not None or sample is None:
        return f"{head} {one.how}".rstrip()
    calls = [
        f"{str(call).removeprefix('call ')} on {sample.name_of(call.group)}"
        + f" for {duration(sample.age(call))}"
        + (f", waits for rank {call.waiting_for}" if call.waiting_for is not None else "")
        + f", {call.site}"
        for call in sample.open_calls[:1]
    ]
    more = f" (+{len(sample.open_calls) - 1})" if len(sample.open_calls) > 1 else ""
    return (
        f"{head} {duration(one.step):>9} {percent(one.smooth.inside):>9}  {''.join(calls)}{more}"
    ).rstrip()


def _bar(waiting: float, inside: float) -> str:
    first, whole = (round(_BAR * min(1.0, share)) for share in (waiting, inside))
    return "░" * first + "█" * (whole - first)


def _note(at: float, kind: str, text: str) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at))} {kind:8} {text}"


def _cut(line: str, width: int) -> str:
    if "\x1b" in line:
        return line  # a row of the mesh, which fits
    return line if len(line) <= width else line[: width - 1] + "…"


def stack_lines(stacks: dict[str, Any]) -> Sequence[str]:
    """Return the lines that show a result of ``JobWatch.stacks``."""
    found = [f"rank {stacks['rank']} on {stacks['host']}, process {stacks['pid']}:", ""]
    found += ["main thread, in the program:", *stacks["main"]]
    for name, stack in stacks["threads"].items():
        found += ["", f"thread {name}:", *stack]
    return found
