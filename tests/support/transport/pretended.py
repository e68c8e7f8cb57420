"""Hosts and sites that are pretended: ranks are threads, and a rank is told where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.support.transport.rank_threads import Transport
from transport._choosing.choice import Thresholds
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._hierarchical import HierarchicalCommunicator
from transport._hierarchical.auto import choose
from transport._hierarchical.hosts import MembersByHost, Spread
from transport._links.communicator import LinkCommunicator
from transport._operands.compression import Compression
from transport._place import Place
from transport._shm import ShmCommunicator

Across = Callable[[Membership, Thresholds], LinkCommunicator]


def pretended(
    places: Sequence[Place] | str,
    across: Across | None = None,
    compression: Compression | None = None,
) -> Transport:
    """Return the transport that is chosen for ranks at ``places``, or on hosts of these names.

    ``across`` makes what connects hosts, in place of TCP; it has a mailbox of its own, so messages
    from any member do not come from this host.
    """
    everywhere = tuple(Place(p) if isinstance(p, str) else p for p in places)

    def make(membership: Membership, table: Thresholds) -> Communicator[Any]:
        membership = replace(membership, places=everywhere, compression=compression)
        if across is None:
            return choose(membership, table)
        placement = MembersByHost.of(everywhere)
        host, _ = placement.find(membership.rank)
        near = None
        if placement.memory[host]:
            near = ShmCommunicator(membership, members=placement.hosts[host])
        if near is not None and len(placement.hosts) == 1:
            return near
        far = across(membership, table)
        if Spread.LEVELS not in (placement.spread, placement.by_site().spread):
            return far
        return HierarchicalCommunicator(membership, placement, far, near, table)

    return Transport(f"places {places}", make)
