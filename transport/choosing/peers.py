"""Whom a rank exchanges frames with, by algorithm: so that connections are made side by side."""

from __future__ import annotations

from transport.choosing.choice import Algorithm


def peers_of(algorithm: Algorithm, rank: int, size: int) -> list[int]:
    """Return the members that ``rank`` of ``size`` needs links to, each once; none where there is
    one at most, or where who calls whom depends on a root.
    """
    match algorithm:
        case Algorithm.PAIRWISE:
            found = [(rank + step) % size for step in range(1, size)]
        case Algorithm.RING:
            found = [(rank + 1) % size, (rank - 1) % size]
        case Algorithm.BRUCK | Algorithm.DISSEMINATION:
            steps = [1 << level for level in range((size - 1).bit_length())]
            found = [(rank + step) % size for step in (*steps, *(-step for step in steps))]
        case Algorithm.DOUBLING:
            found = _partners(rank, size)
        case _:
            found = []
    return [peer for peer in dict.fromkeys(found) if peer != rank]


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
