"""The choice of the next mesh, as a pure function of the members' reports.

A *replica* consists of all ranks at one coordinate of the elastic dim. It has the whole state, so
it can continue without the other replicas. On a mesh of one dim, it is one rank; on a mesh of two
dims, it has all shards of the parameters.
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
    """One member's numbers of ``committed`` steps and of samples used by them (``cursor``).

    ``voted`` is 0, or the number of samples in a step for which the member has voted but does not
    know the result. A ``fresh`` member has no state, and its numbers are ignored.
    """

    committed: int
    cursor: int
    voted: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The next mesh: its ``ranks`` as nested lists, and the step at which they begin.

    The ``fresh`` ranks have no state. With ``stateless``, no rank has the state.
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
    """Return the next mesh, or None if fewer than ``min_size`` replicas are possible.

    ``ranks`` is the current mesh, with a replica for each place along ``axis``. The next mesh has
    up to ``size`` replicas. A replica stays, in the same order, if all its ranks have
    ``proposals``. Free places go to the live ranks of broken replicas, then to the ranks
    ``waiting`` for a place.
    """
    rows = np.moveaxis(ranks, axis, 0)
    shape, flat = rows.shape[1:], rows.reshape(len(rows), -1)
    reports = {rank: MemberReport(**proposal) for rank, proposal in proposals.items()}
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
    """Return the committed steps, the samples used, and the replicas with this state.

    If one member has committed a step, all have voted for it, so they can commit it as well.
    """
    trained = [report for rank, report in reports.items() if not report.fresh and rank in placed]
    trained = trained or [report for report in reports.values() if not report.fresh]
    if not trained:
        return 0, 0, []
    committed, cursor = max((report.committed, report.cursor) for report in trained)

    def has_state(rank: int) -> bool:
        report = reports.get(rank)
        if rank not in placed or report is None or report.fresh:
            return False
        can_commit = bool(report.voted and report.committed < committed)
        return report.committed + can_commit == committed

    return committed, cursor, [row for row in rows if all(map(has_state, row))]
