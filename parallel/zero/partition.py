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


def check_group_rank(to: Any, group: ProcessGroup) -> None:
    """Raise TypeError unless ``to`` is a whole number or None, ValueError for no rank of it."""
    if to is not None and not 0 <= to_whole_number(to, "to") < group.size():
        raise ValueError(f"to must lie in [0, {group.size()}), or be None, got {to}: {group}")


def collected(own: Any, group: ProcessGroup, to: int | None) -> list[Any] | None:
    """Return what each member has as its ``own``, on group rank ``to`` (None: on all); else None.

    A collective.
    """
    parts: list[Any] | None = [None] * group.size() if to in (None, group.rank()) else None
    if to is None:
        group.all_gather_object(parts or [], own)
    else:
        group.gather_object(own, parts, group_dst=to)
    return parts
