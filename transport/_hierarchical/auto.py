"""The backend ``auto``, which chooses a group's communicator by its members' hosts."""

from __future__ import annotations

import logging
import os

from transport import _environment as environment
from transport._choosing.choice import Thresholds
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._hierarchical import HierarchicalCommunicator
from transport._hierarchical.hosts import MembersByHost, Spread
from transport._shm import ShmCommunicator
from transport._tcp import TcpCommunicator

_LOGGER = logging.getLogger("meshlib.transport")


def choose(membership: Membership, table: Thresholds | None = None) -> Communicator:
    """Return the communicator for ``membership``, whose ``places`` must be known.

    Members on one host use shared memory; members on different hosts use TCP. All use TCP if each
    has a host of its own, or if the members of a single host cannot share memory. ``table`` chooses
    the algorithms (default: the job's tuning).
    """
    placement = MembersByHost.of(membership.places)
    host, _ = placement.find(membership.rank)
    members, shares = placement.hosts[host], placement.memory[host]
    if len(members) > 1 and not shares:
        _note_obstacle(membership)
    near = ShmCommunicator(membership, members=members) if shares else None
    if near is not None and len(placement.hosts) == 1:
        return near
    far = TcpCommunicator(membership, table, None if near is None else near.mailbox)
    if Spread.LEVELS not in (placement.spread, placement.by_site().spread):
        return far
    return HierarchicalCommunicator(membership, placement, far, near, table)


def _note_obstacle(membership: Membership) -> None:
    """Log, once for each host, why its ranks do not share memory."""
    obstacle = membership.places[membership.rank].obstacle
    is_first = os.environ.get(environment.LOCAL_RANK, "0") == "0"
    if obstacle and is_first and membership.runtime.note_once(obstacle):
        _LOGGER.warning("ranks of this host use TCP instead of shared memory: %s", obstacle)
