"""Whom a rank exchanges frames with, by algorithm: so that connections are made side by side."""

from __future__ import annotations

from functools import lru_cache

from transport.choosing.choice import Algorithm


def peers_of(algorithm: Algorithm, rank: int, size: int, root: int = 0) -> list[int]:
    """Return the members that ``rank`` of ``size`` needs links to, each once; none for a star, in
    which only the centre has several, whom the others call.
    """
    match algorithm:
        case Algorithm.PAIRWISE:
            found = [(rank + step) % size for step in range(1, size)]
        case Algorithm.RING:
            found = [(rank + 1) % size, (rank - 1) % size]
        case Algorithm.BRUCK | Algorithm.DISSEMINATION:
            steps = [1 << level for level in range((size - 1).bit_length())]
            found = [(rank + step) % size for step in (*steps, *(-step for step in steps))]
        case Algorithm.TREE:
            parent, children = relatives((rank - root) % size, size)
            places = children if parent is None else (parent, *children)
            found = [(place + root) % size for place in places]
        case Algorithm.CHAIN:
            place = (rank - root) % size
            steps = [-1] * (place > 0) + [1] * (place < size - 1)
            found = [(rank + step) % size for step in steps]
        case Algorithm.DIRECT:
            others = [(rank + step) % size for step in range(1, size)]
            found = others if rank == root else [root]
        case Algorithm.DOUBLING:
            folded, partners = doubling_partners(rank, size)
            found = partners if folded is None else (folded, *partners)
        case _:
            found = []
    return [peer for peer in dict.fromkeys(found) if peer != rank]


@lru_cache(maxsize=256)
def relatives(place: int, size: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the places of the parent and of the children, the farthest first, in a binomial tree:
    the parent of p is p without its lowest bit that is set, its children are p + d for each power
    of two d below that bit. The root, place 0, has no parent.
    """
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    parent = place - distance if place else None
    children: list[int] = []
    while distance > 1:
        distance //= 2
        if place + distance < size:
            children.append(place + distance)
    return parent, tuple(children)


@lru_cache(maxsize=256)
def doubling_partners(rank: int, size: int) -> tuple[int | None, tuple[int, ...]]:
    """Return whom ``rank`` folds with in recursive doubling, if anybody, and whom it exchanges with
    then, in this order.

    Of ``size`` = 2^k + e ranks the first 2e fold into e: each even one gives its data to the odd
    one above, and exchanges with nobody else.
    """
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    folds = rank < 2 * extra
    if folds and rank % 2 == 0:
        return rank + 1, ()
    place = rank // 2 if folds else rank - extra
    places = [place ^ (1 << level) for level in range(power.bit_length() - 1)]
    partners = tuple(2 * other + 1 if other < extra else other + extra for other in places)
    return rank - 1 if folds else None, partners
