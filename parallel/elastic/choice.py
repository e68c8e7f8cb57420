"""Who goes on, and in which place: a pure function of what the members have said.

A *replica* is a coordinate of the dim whose ranks can do without each other, with all ranks that
stand there: one rank on a mesh of one dim, all shards of the parameters on one of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RankArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a member says of itself: the steps that it has ``committed``, and the samples used up by
    them (``cursor``); whether it has ``voted`` for the step after those, and does not know how the
    vote went (the samples of that step, or 0); whether it is ``fresh``: it has no state, whatever
    the numbers say.
    """

    committed: int
    cursor: int
    voted: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen: ``ranks`` in the shape of the next mesh, at which step they begin, and who
    of them has no state. ``stateless``: nobody has.
    """

    ranks: Any
    committed: int
    cursor: int
    fresh: Sequence[int]
    stateless: bool


def choose(
    ranks: RankArray,
    axis: int,
    size: int,
    min_size: int,
    said: Mapping[int, Mapping[str, Any]],
    waiting: Sequence[int],
) -> Choice | None:
    """Return who goes on, None while there are fewer than ``min_size`` replicas.

    ``ranks`` are those of the present mesh, with a replica for each place along ``axis``; up to
    ``size`` replicas are made up of those in it that have ``said`` something, of live ranks of the
    other replicas, and of those ``waiting`` for a place, in this order. A replica that goes on
    keeps its place among the others.
    """
    rows = np.moveaxis(ranks, axis, 0)
    shape, flat = rows.shape[1:], rows.reshape(len(rows), -1)
    standings = {rank: Standing(**one) for rank, one in said.items()}
    found: list[list[int] | None] = [
        row if all(rank in standings for rank in row) else None for row in flat.tolist()
    ]
    found += [None] * (size - len(found))
    placed = {rank for row in found if row is not None for rank in row}
    pool = [rank for rank in flat.ravel().tolist() if rank in standings and rank not in placed]
    pool += [rank for rank in waiting if rank not in placed and rank not in pool]
    width = flat.shape[1]
    for i, row in enumerate(found):
        if row is None and len(pool) >= width:
            found[i], pool = pool[:width], pool[width:]
    chosen = [row for row in found if row is not None]
    if len(chosen) < min_size:
        return None
    committed, cursor, holders = _state_of(chosen, standings, placed)
    fresh = [rank for row in chosen if row not in holders for rank in row]
    array = np.moveaxis(np.array(chosen).reshape(len(chosen), *shape), 0, axis)
    return Choice(array.tolist(), committed, cursor, fresh, stateless=not holders)


def _state_of(
    rows: Sequence[list[int]], standings: Mapping[int, Standing], placed: set[int]
) -> tuple[int, int, list[list[int]]]:
    """Return the steps that are committed, the samples used up, and the replicas with that state.

    What one member has committed all have voted for, and can commit.
    """
    told = [one for rank, one in standings.items() if not one.fresh and rank in placed]
    told = told or [one for one in standings.values() if not one.fresh]
    if not told:
        return 0, 0, []
    committed, cursor = max((one.committed, one.cursor) for one in told)

    def has_state(rank: int) -> bool:
        one = standings.get(rank)
        if rank not in placed or one is None or one.fresh:
            return False
        return one.committed + bool(one.voted and one.committed < committed) == committed

    return committed, cursor, [row for row in rows if all(map(has_state, row))]
