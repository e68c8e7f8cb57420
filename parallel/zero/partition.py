"""Who owns which parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshlib import ProcessGroup
from transport.checks import to_whole_number


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return an owner for each of ``sizes``, so that ``loads`` (one a rank) stay balanced.

    The largest first, each to the rank with the least (Graham's rule: no rank gets more than 4/3
    of what the best assignment gives the fullest one). ``loads`` is updated. A parameter is never
    split, so one that is larger than all others together is somebody's alone.
    """
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += sizes[number]
    return owners


def to_group_rank(to: Any, group: ProcessGroup) -> int:
    """Return the group rank ``to``: TypeError for no whole number, ValueError for one outside."""
    to = to_whole_number(to, "to")
    if not 0 <= to < group.size():
        raise ValueError(f"to must lie in [0, {group.size()}), or be None, got {to}: {group}")
    return to
