"""Handing out what each owner has updated."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from meshlib.process_group import ProcessGroup
from parallel.arrays import Array, namespace, placement
from parallel.nn.parameter import Parameter


class Shards:
    """The parameters of one dtype and device, in one flat array, owner after owner.

    With ``as_views`` the parameters live in that array for good; without, they are copied through
    one that lives as long as the exchange.
    """

    def __init__(
        self, owners: Mapping[Parameter, int], group: ProcessGroup, *, as_views: bool
    ) -> None:
        self._group = group
        self._as_views = as_views
        self._by_owner: list[list[Parameter]] = [[] for _ in range(group.size())]
        for parameter, owner in owners.items():
            self._by_owner[owner].append(parameter)
        self._like = next(iter(owners)).data
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
        me = self._group.rank()
        flat = self._flat if self._as_views else self._allocate()
        if not self._as_views:
            for parameter, view in self._views(me, flat):
                view[...] = parameter.data
        rows = [flat[begin:end] for begin, end in itertools.pairwise(self._ends)]
        self._group.all_gather(rows, rows[me])
        if not self._as_views:
            for rank in range(self._group.size()):
                if rank != me:
                    for parameter, view in self._views(rank, flat):
                        parameter.data[...] = view

    def _allocate(self) -> Array:
        return namespace(self._like).empty(self._ends[-1], dtype=self._like.dtype)

    def _views(self, rank: int, flat: Array) -> list[tuple[Parameter, Array]]:
        part = self._by_owner[rank]
        ends = itertools.accumulate((p.size for p in part), initial=self._ends[rank])
        return [
            (parameter, flat[begin:end].reshape(parameter.shape))
            for parameter, (begin, end) in zip(part, itertools.pairwise(ends), strict=True)
        ]


def shards_by_placement(
    owners: Mapping[Parameter, int], group: ProcessGroup, *, as_views: bool
) -> list[Shards]:
    """Return one ``Shards`` for each dtype and device, in an order that all ranks share."""
    piles: dict[tuple[str, str], dict[Parameter, int]] = {}
    for parameter, owner in owners.items():
        piles.setdefault(placement(parameter.data), {})[parameter] = owner
    return [Shards(pile, group, as_views=as_views) for pile in piles.values()]
