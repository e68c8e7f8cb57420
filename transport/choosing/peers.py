"""Whom a rank exchanges frames with, by algorithm: so that connections are made side by side."""

from __future__ import annotations

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
            found = [(place + root) % size for place in _relatives((rank - root) % size, size)]
        case Algorithm.CHAIN:
            place = (rank - root) % size
            steps = [-1] * (place > 0) + [1] * (place < size - 1)
            found = [(rank + step) % size for step in steps]
        case Algorithm.DIRECT:
            others = [(rank + step) % size for step in range(1, size)]
            found = others if rank == root else [root]
        case Algorithm.DOUBLING:
            found = _partners(rank, size)
        case _:
            found = []
    return [peer for peer in dict.fromkeys(found) if peer != rank]


def _relatives(place: int, size: int) -> list[int]:
    """See ``tree``: the places of the parent, if there is one, and of the children."""
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    found = [place - distance] if place else []
    while distance > 1:
        distance //= 2
        if place + distance < size:
            found.append(place + distance)
    return found


def _partners(rank: int, size: int) -> list[int]:
    """See ``recursive``."""
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    if rank < 2 * extra and rank % 2 == 0:
        return [rank + 1]
    found = [rank - 1] if rank < 2 * extra else []
    place = rank // 2 if rank < 2 * extra else rank - extra
    for level in range(power.bit_length() - 1):
        partner = place ^ (1 << level)
        found.append(2 * partner + 1 if partner < extra else partner + extra)
    return found
