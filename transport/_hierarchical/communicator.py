"""A communicator for groups over several hosts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from transport._calls.call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._hierarchical.copies import Copies
from transport._hierarchical.hosts import MembersByHost, Spread
from transport._hierarchical.levels import Levels, Tables
from transport._hierarchical.reductions import Reductions
from transport._links.communicator import LinkCommunicator
from transport._operands.reduce_op import Flat
from transport._shm import ShmCommunicator

_LOGGER = logging.getLogger("meshlib.transport")


class TwoLevels(Copies, Reductions):
    """All collectives on two levels."""


class HierarchicalCommunicator(TwoLevels, Communicator):
    """Collectives and messages through ``near`` inside a host, and through ``far`` between hosts.

    ``near`` connects the members on this host. It is None if they cannot share memory, or if this
    rank is the only member on its host. ``far`` connects all members; its mailbox receives the
    messages of all of them. ``placement`` has a host with several members, or a site with several
    hosts.

    If the hosts have sites (``MESHLIB_SITE``), there are three levels: members are grouped by site
    first, then by host. The order of addition does not depend on the placement. It is cheap if each
    host's ranks are a block of it (``_hierarchical/sums.py``).

    ``table`` chooses the algorithms (default: the job's tuning).
    """

    def __init__(
        self,
        membership: Membership,
        placement: MembersByHost,
        far: LinkCommunicator,
        near: ShmCommunicator | None = None,
        table: Thresholds | None = None,
    ) -> None:
        Communicator.__init__(self, membership)
        tables: Tables = membership.runtime.tuning.thresholds
        if table is not None:
            tables = lambda _transport, _size: table  # noqa: E731
        self._far = far
        self._near = near
        host, _ = placement.find(self.rank)
        local = placement.hosts[host] if near is not None else ()
        self._neighbours = frozenset(local) - {self.rank}
        sites = placement.by_site()
        if sites.spread is not Spread.LEVELS:
            TwoLevels.__init__(self, placement, far, tables, near)
        else:
            TwoLevels.__init__(self, sites, far, tables, between_sites=True)
            here = placement.within(self.local)
            if here.spread is Spread.LEVELS:
                self.inside = TwoLevels(here, self.select(self.local), tables, near)
                self._note_sums(self.inside, "hosts")
            elif near is not None:
                self.inside = near
        self._note_sums(self, "hosts" if sites.spread is not Spread.LEVELS else "sites")

    def _note_sums(self, levels: Levels, what: str) -> None:
        """Log if the numbering of the ranks makes more than one sum for each host cross."""
        if not levels.one_tree and self.rank == 0:
            _LOGGER.info(
                "%s: the %s' ranks %s are not equal blocks of the order of addition, so %d sums"
                " cross between them instead of one for each; to avoid this, number the ranks so"
                " that each has a power of two of consecutive ranks",
                self.membership.group,
                what,
                " | ".join(str(list(ranks)) for ranks in levels.hosts),
                len(levels.all_blocks),
            )

    def allocate(self, call: Call, count: int, dtype: np.dtype[np.generic]) -> Flat:
        """See ``Communicator.allocate``. The members on one host share the memory."""
        self.barrier(call)  # Its headers reveal members on other hosts that disagree.
        if self._near is None:
            return np.empty(count, dtype)
        return self._near.allocate(call, count, dtype)

    def share(self, call: Call, sizes: Sequence[int]) -> list[Flat | None]:
        """See ``Communicator.share``. The members on one host share the memory."""
        return super().share(call, sizes) if self._near is None else self._near.share(call, sizes)

    def check_peer(self, peer: int) -> None:
        """See ``Communicator.check_peer``."""
        self._towards(peer).check_peer(peer)

    # Point to point.

    def _towards(self, peer: int | None) -> Communicator:
        """Return the communicator for messages with ``peer`` (None: any member)."""
        near = self._near
        return self._far if near is None or peer not in self._neighbours else near

    def send(self, call: Call, buffer: Flat, dst: int, tag: int) -> None:
        self._towards(dst).send(call, buffer, dst, tag)

    def takes_at_once(self, dst: int, nbytes: int) -> bool:
        return self._towards(dst).takes_at_once(dst, nbytes)

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        return self._towards(src).recv(call, buffer, src, tag)

    def lose(self, peer: int, reason: str) -> None:
        # Not always ``near``, which does not see messages that are in flight over TCP.
        self._towards(peer).lose(peer, reason)

    def message_rings(self) -> tuple[object, ...] | None:
        return None if self._near is None else self._near.message_rings()

    def lend_rings(self, peer: int) -> tuple[object, ...] | None:
        return None if self._near is None else self._near.lend_rings(peer)

    @property
    def receiving(self) -> bool:
        return self._far.receiving

    def left_over(self) -> list[str]:
        return self._far.left_over()

    # The end.

    def abort(self, reason: str) -> None:
        self.abort_reason = self.abort_reason or reason
        for part in self._parts:
            part.abort(reason)

    def close(self) -> None:
        self.abort_reason = self.abort_reason or "the communicator was closed"
        for part in self._parts:
            part.close()

    @property
    def _parts(self) -> list[Communicator]:
        return [self._far] if self._near is None else [self._far, self._near]
