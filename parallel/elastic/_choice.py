"""The choice of the next mesh: a pure function of the members' reports.

A *replica* is all ranks at one coordinate of the elastic dim, which can do without the ranks at the
others. On a mesh of one dim, it is one rank. On a mesh of two dims, it has all shards of the
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RankArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One member's report: its ``committed`` steps, and the samples they used up (``cursor``).

    ``voted`` is 0, or the number of samples of a step for which the member has voted without
    learning the result. A ``fresh`` member has no state, whatever its numbers are.
    """

    committed: int
    cursor: int
    voted: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The next mesh: its ``ranks`` in its shape, and the step at which they begin.

    The ``fresh`` ranks have no state; ``stateless``: no rank has.
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
    proposals: Mapping[int, Mapping[str, Any]],
    waiting: Sequence[int],
) -> Choice | None:
    """Return the next mesh, None while there are fewer than ``min_size`` replicas.

    ``ranks`` is the present mesh, with one replica for each place along ``axis``. The next mesh has
    up to ``size`` replicas. A replica stays if all its ranks have ``proposals``, and keeps
    its place among the others. Other places go to the live ranks of broken replicas, then to the
    ranks ``waiting`` for a place.
    """
    rows = np.moveaxis(ranks, axis, 0)
    shape, flat = rows.shape[1:], rows.reshape(len(rows), -1)
    reports = {rank: MemberReport(**one) for rank, one in proposals.items()}
    found: list[list[int] | None] = [
        row if all(rank in reports for rank in row) else None for row in flat.tolist()
    ]
    found += [None] * (size - len(found))
    placed = {rank for row in found if row is not None for rank in row}
    pool = [rank for rank in flat.ravel().tolist() if rank in reports and rank not in placed]
    pool += [rank for rank in waiting if rank not in placed and rank not in pool]
    width = flat.shape[1]
    for i, row in enumerate(found):
        if row is None and len(pool) >= width:
            found[i], pool = pool[:width], pool[width:]
    chosen = [row for row in found if row is not None]
    if len(chosen) < min_size:
        return None
    committed, cursor, holders = _state_of(chosen, reports, placed)
    fresh = [rank for row in chosen if row not in holders for rank in row]
    array = np.moveaxis(np.array(chosen).reshape(len(chosen), *shape), 0, axis)
    return Choice(array.tolist(), committed, cursor, fresh, stateless=not holders)


def _state_of(
    rows: Sequence[list[int]], reports: Mapping[int, MemberReport], placed: set[int]
) -> tuple[int, int, list[list[int]]]:
    """Return the committed steps, the samples used up, and the replicas with that state.

    All members have voted for a step that one has committed, so they can commit it.
    """
    trained = [one for rank, one in reports.items() if not one.fresh and rank in placed]
    trained = trained or [one for one in reports.values() if not one.fresh]
    if not trained:
        return 0, 0, []
    committed, cursor = max((one.committed, one.cursor) for one in trained)

    def has_state(rank: int) -> bool:
        one = reports.get(rank)
        if rank not in placed or one is None or one.fresh:
            return False
        return one.committed + bool(one.voted and one.committed < committed) == committed

    return committed, cursor, [row for row in rows if all(map(has_state, row))]
