"""A rank's peers in each algorithm, so that it can connect to all of them at once."""

from __future__ import annotations

from transport._choosing.blocks import halving_schedule
from transport._choosing.choice import Algorithm
from transport._operands.order import relatives


def peers_of(algorithm: Algorithm, rank: int, size: int, root: int = 0) -> list[int]:
    """Return the members that ``rank`` of ``size`` needs links to, without duplicates.

    A star needs none in advance: only its centre has several peers, and they connect to it.
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
            parent, children = relatives(rank, size, root)
            found = [] if parent is None else [parent]
            found += [child for child, _ in children]
        case Algorithm.CHAIN:
            place = (rank - root) % size
            steps = [-1] * (place > 0) + [1] * (place < size - 1)
            found = [(rank + step) % size for step in steps]
        case Algorithm.DIRECT:
            others = [(rank + step) % size for step in range(1, size)]
            found = others if rank == root else [root]
        case Algorithm.DOUBLING:
            found = [rank ^ (1 << level) for level in range((size - 1).bit_length())]
        case Algorithm.HALVING:
            found = halving_schedule(rank, size).peers
        case _:
            found = []
    return [peer for peer in dict.fromkeys(found) if peer != rank]
