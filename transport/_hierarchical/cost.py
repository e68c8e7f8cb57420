"""Predicted times of collectives over several hosts, on two levels and on one."""

from __future__ import annotations

from dataclasses import dataclass

from transport._calls.header import Kind
from transport._choosing.choice import Algorithm, Thresholds
from transport._choosing.cost import Cost, work_of

_STEPS_INSIDE = 2
"""A collective in shared memory waits for all members twice: to begin reading and to end."""


def inside_bytes(kind: Kind, nbytes: int, size: int) -> float:
    """Return the bytes that one of ``size`` members reads in shared memory: the bytes that it
    stages, and those that it reads from the other members' stages.

    ``nbytes`` is the size of each member's input, as in ``work_of``. Raises ValueError for a
    ``kind`` that is not used inside a host.
    """
    others = (size - 1) / size * nbytes
    match kind:
        case Kind.BARRIER:
            return 0
        case Kind.BROADCAST:
            return nbytes
        case Kind.ALL_REDUCE:  # A reduce-scatter, and an all-gather of the parts.
            return nbytes + others + nbytes / size + others
        case Kind.REDUCE_SCATTER | Kind.ALL_TO_ALL:
            return nbytes + others
        case Kind.ALL_GATHER | Kind.GATHER:
            return nbytes + size * others
        case _:
            raise ValueError(f"{kind.name} is not a step inside a host")


@dataclass(frozen=True, slots=True)
class Shape:
    """A job on ``hosts`` with ``ranks_per_host`` each, numbered host by host."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, slots=True)
class CollectivePhase:
    """A collective ``inside`` each host, or else between one member of each host. Each frame is
    sent in ``turns`` pieces.
    """

    inside: bool
    kind: Kind
    nbytes: int
    turns: int = 1


def phases(kind: Kind, nbytes: int, shape: Shape) -> list[CollectivePhase]:
    """Return the phases of the hierarchical transport for a large call, in order.

    All slices cross the network through one network card of each host. They are therefore returned
    as one phase with all the data, between one member of each host. Raises ValueError for a
    ``kind`` without phases.
    """
    ranks = shape.ranks_per_host
    share = -(-nbytes // ranks)
    match kind:
        case Kind.BARRIER:
            return [
                CollectivePhase(True, kind, 0),
                CollectivePhase(False, kind, 0),
                CollectivePhase(True, kind, 0),
            ]
        case Kind.BROADCAST:  # The root's host copies at the same time.
            return [
                CollectivePhase(False, kind, nbytes),
                CollectivePhase(True, Kind.ALL_GATHER, share),
            ]
        case Kind.ALL_REDUCE | Kind.REDUCE:
            back = Kind.GATHER if kind is Kind.REDUCE else Kind.ALL_GATHER
            inside = CollectivePhase(True, Kind.REDUCE_SCATTER, nbytes)
            return [
                inside,
                CollectivePhase(False, kind, nbytes),
                CollectivePhase(True, back, share),
            ]
        case Kind.ALL_GATHER:
            return [
                CollectivePhase(True, kind, nbytes),
                CollectivePhase(False, kind, ranks * nbytes),
                CollectivePhase(True, kind, (shape.hosts - 1) * nbytes),
            ]
        case Kind.REDUCE_SCATTER:
            return [CollectivePhase(True, kind, nbytes), CollectivePhase(False, kind, nbytes)]
        case Kind.ALL_TO_ALL:
            here = nbytes // shape.hosts
            return [
                CollectivePhase(True, kind, here),
                CollectivePhase(False, kind, ranks * nbytes, turns=ranks),
            ]
        case _:
            raise ValueError(f"{kind.name} has no phases")


@dataclass(frozen=True, slots=True)
class HostsCost:
    """The costs inside a host, and between hosts with one network card each."""

    inside: Cost
    across: Cost

    def on_two_levels(self, kind: Kind, nbytes: int, shape: Shape, table: Thresholds) -> float:
        """Return the seconds that ``kind`` takes on two levels; ``nbytes`` as in ``work_of``."""
        return sum(self._phase(phase, shape, table) for phase in phases(kind, nbytes, shape))

    def on_one_level(self, kind: Kind, nbytes: int, shape: Shape, table: Thresholds) -> float:
        """Return the seconds that ``kind`` takes if all ranks use the network alike."""
        work = work_of(kind, nbytes, shape.ranks, table)
        path = self.across.path_seconds(work)
        through_card = work.nbytes * _crossing(work.algorithm, shape) / shape.hosts
        return max(path, work.steps * self.across.alpha + through_card * self.across.beta)

    def _phase(self, phase: CollectivePhase, shape: Shape, table: Thresholds) -> float:
        if not phase.inside:
            work = work_of(phase.kind, phase.nbytes, shape.hosts, table)
            return self.across.path_seconds(work, phase.turns)
        ranks = shape.ranks_per_host
        if ranks == 1:
            return 0.0
        steps = 1 if phase.kind is Kind.BARRIER else _STEPS_INSIDE
        moved = inside_bytes(phase.kind, phase.nbytes, ranks)
        crowd = max(1.0, ranks / self.inside.parallelism)
        return crowd * (steps * self.inside.alpha + moved * self.inside.beta)


def _crossing(algorithm: Algorithm, shape: Shape) -> float:
    """Return the share of all sent bytes that leave a host.

    In a ring or a chain, only one rank of a host sends to another host. Halving sends to other
    hosts only after its exchanges inside a host.
    """
    if shape.hosts == 1:
        return 0.0
    if algorithm in (Algorithm.RING, Algorithm.CHAIN, Algorithm.HALVING):
        return 1 / shape.ranks_per_host
    return (shape.ranks - shape.ranks_per_host) / (shape.ranks - 1)
