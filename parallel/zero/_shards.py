"""Who owns which parameter, and handing out what each owner has updated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshlib import ProcessGroup
from meshlib.extend import to_whole_number
from parallel._arrays import Array, namespace, pieces, placement
from parallel._core.assignment import MIB
from parallel._groups import gathered
from parallel.nn._parameter import Parameter

_COPIED_BYTES = 64 * MIB
"""What one exchange may copy: it takes so much memory, or as much as the largest parameter."""


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
    if to is None:
        return gathered(own, group)
    parts: list[Any] | None = [None] * group.size() if to == group.rank() else None
    group.gather_object(own, parts, group_dst=to)
    return parts


class Shards:
    """Parameters of one dtype and device, in one flat array, owner after owner.

    With ``as_views`` the parameters live in that array for good; without, they are copied through
    one that lives as long as the exchange.
    """

    def __init__(
        self, by_owner: Sequence[Sequence[Parameter]], group: ProcessGroup, *, as_views: bool
    ) -> None:
        self._group = group
        self._by_owner = by_owner
        self._like = next(parameter.data for part in by_owner for parameter in part)
        sizes = [sum(parameter.size for parameter in part) for part in self._by_owner]
        self._ends = [0, *itertools.accumulate(sizes)]
        self._flat: Array = None
        if as_views:
            self._flat = self._allocate()
            for rank in range(group.size()):
                for parameter, view in self._views(rank, self._flat):
                    view[...] = parameter.data
                    parameter.data = view

    def exchange(self) -> None:
        """Make all parameters equal to those of their owners. One all-gather."""
        if self._group.size() == 1:
            return
        me = self._group.rank()
        flat = self._flat
        if flat is None:
            flat = self._allocate()
            for parameter, view in self._views(me, flat):
                view[...] = parameter.data
        rows = [flat[begin:end] for begin, end in itertools.pairwise(self._ends)]
        self._group.all_gather(rows, rows[me])
        if self._flat is None:
            for rank in range(self._group.size()):
                if rank != me:
                    for parameter, view in self._views(rank, flat):
                        parameter.data[...] = view

    def _allocate(self) -> Array:
        return namespace(self._like).empty(self._ends[-1], dtype=self._like.dtype)

    def _views(self, rank: int, flat: Array) -> list[tuple[Parameter, Array]]:
        part = self._by_owner[rank]
        views = pieces(flat, (parameter.shape for parameter in part), self._ends[rank])
        return list(zip(part, views, strict=True))


def shards_by_placement(
    owners: Mapping[Parameter, int], group: ProcessGroup, *, as_views: bool
) -> list[Shards]:
    """Return the ``Shards`` for each dtype and device, in an order that all ranks share.

    With ``as_views`` one, otherwise as many as keep what each copies small.
    """
    ranks = range(group.size())
    piles: dict[tuple[str, str], list[list[Parameter]]] = {}
    for parameter, owner in owners.items():
        piles.setdefault(placement(parameter.data), [[] for _ in ranks])[owner].append(parameter)
    parts: list[Sequence[list[Parameter]]] = []
    for pile in piles.values():
        chunks = [[own] if as_views else _chunks(own, len(ranks)) for own in pile]
        parts += itertools.zip_longest(*chunks, fillvalue=[])
    return [Shards(part, group, as_views=as_views) for part in parts]


def _chunks(parameters: Sequence[Parameter], ranks: int) -> Iterator[list[Parameter]]:
    chunk: list[Parameter] = []
    nbytes = 0
    for parameter in parameters:
        size = int(parameter.data.nbytes)
        if chunk and nbytes + size > _COPIED_BYTES // ranks:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(parameter)
        nbytes += size
    if chunk:
        yield chunk
