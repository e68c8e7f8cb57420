"""A communicator for groups over several hosts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from transport._call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.base import Collectives, Communicator
from transport._communicators.forwarding import Forwarding
from transport._communicators.runtime import Membership
from transport._communicators.store_waits import PeerKeys
from transport._errors import CommunicatorAbortedError, PeerLostError
from transport._hierarchical import copies, reductions
from transport._hierarchical.hosts import Placement, Spread, await_placement, publish_place
from transport._hierarchical.inside import Inside, PartMembership
from transport._hierarchical.levels import Levels, Selection
from transport._links.communicator import LinkCommunicator
from transport._operands.quiet import quiet
from transport._operands.reduce_op import Flat
from transport._place import Place, this_place
from transport._shm import ShmCommunicator, unsupported_reason
from transport._tcp import TcpCommunicator

_LOGGER = logging.getLogger("meshlib.transport")
_REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter"}


class HierarchicalCommunicator(Forwarding, Communicator):
    """Collectives inside each host by ``inside``, between hosts by ``across``.

    Which members share a host is found out at the first collective, whatever their ranks are. Where
    members of a host cannot share memory, ``across`` connects them as well; a group on one host
    uses ``inside`` alone, one without two members on any host ``across`` alone. Where hosts have
    sites (``MESHLIB_SITE``), there are three levels: a site is to the others what a host is, and on
    two levels itself. Messages go by ``across``. The order of addition is that of all transports,
    wherever ranks are; it is cheap where each host has a block of it (``hierarchical/sums.py``).

    ``host`` is where this rank is taken to be (default: where it is), ``table`` chooses algorithms
    (default: the job's tuning). Who knows where all members are gives that as ``placement``, equal
    on all of them, and nobody is asked.
    """

    def __init__(
        self,
        membership: Membership,
        table: Thresholds | None = None,
        host: Place | None = None,
        across: Callable[[Membership, Thresholds | None], LinkCommunicator] = TcpCommunicator,
        inside: Callable[[Membership], Communicator] = ShmCommunicator,
        placement: Placement | None = None,
    ) -> None:
        super().__init__(membership)
        self._table = table
        self.abort_reason: str | None = None
        self._make_inside = inside
        self._whole = across(membership, table)
        # Guards what an abort from another thread must find.
        self._lock = threading.Lock()
        self._inside: Communicator | None = None
        self._collectives: Collectives | None = None
        self._keys = PeerKeys(membership)
        self._placement = placement
        if placement is None:
            publish_place(membership, host or this_place(unsupported_reason()))

    # Collectives.

    def _hand_on(self, call: Call, collective: str, *arguments: Any) -> None:
        with self._ended():
            getattr(self._meet(call), collective)(call, *arguments)

    def allocate(self, call: Call, count: int, dtype: np.dtype[np.generic]) -> Flat:
        """See ``Communicator.allocate``: what the members on one host share."""
        self.barrier(call)  # all hosts learn whether all members want the same
        with self._ended():
            inside = self._meet(call)
            while isinstance(inside, TwoLevels):
                inside = inside.inside
            if isinstance(inside, Inside):
                return inside.allocate(call, count, dtype)
        return np.empty(count, dtype)

    # Point to point.

    def send(self, call: Call, buffer: Flat, dst: int, tag: int) -> None:
        with self._ended():
            self._whole.send(call, buffer, dst, tag)

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        with self._ended():
            return self._whole.recv(call, buffer, src, tag)

    def lose(self, peer: int, reason: str) -> None:
        self._whole.lose(peer, reason)

    @property
    def receiving(self) -> bool:
        return self._whole.receiving

    def left_over(self) -> list[str]:
        return self._whole.left_over()

    # The end.

    def abort(self, reason: str) -> None:
        for level in self._stop(reason):
            level.abort(reason)

    def close(self) -> None:
        for level in self._stop("the communicator was closed"):
            level.close()

    def _stop(self, reason: str) -> list[Communicator]:
        with self._lock:
            if self.abort_reason is None:
                self.abort_reason = reason
            levels = [self._inside, self._whole]
        self._keys.cancel(reason)
        return [level for level in levels if level is not None]

    @contextmanager
    def _ended(self) -> Generator[None]:
        """Around a call: one that this rank has aborted says so.

        Levels are aborted one after the other. Whoever learns of the first may be gone before the
        second is, where its leaving is then seen as the loss of a peer.
        """
        try:
            yield
        except PeerLostError as error:
            if self.abort_reason is None:
                raise
            raise CommunicatorAbortedError(self.abort_reason) from error

    # Meeting.

    def _meet(self, call: Call) -> Collectives:
        """Return the collectives, once it is known where everybody is."""
        self.check_open()
        if self._collectives is None:
            keys = self._keys
            placement = self._placement or await_placement(self.membership, keys, call)
            self._collectives = self._arrange(placement, call)
        return self._collectives

    def _arrange(self, placement: Placement, call: Call) -> Collectives:
        """Return the collectives of all: on two levels, or on three where there are sites."""
        sites, everybody = placement.by_site(), tuple(range(self.size))
        if sites.spread is Spread.TOGETHER:
            return self._arrange_hosts(placement, self._whole, everybody, call)
        if sites.spread is Spread.APART:
            return self._whole
        tuning = self.membership.runtime.tuning
        levels = Levels(sites, self._whole, self._table, tuning, between_sites=True)
        self._note_sums(levels, "sites")
        near = levels.select(levels.local)
        here = placement.within(levels.local)
        levels.inside = self._arrange_hosts(here, near, levels.local, call)
        return TwoLevels(levels)

    def _arrange_hosts(
        self,
        placement: Placement,
        whole: LinkCommunicator | Selection,
        members: tuple[int, ...],
        call: Call,
    ) -> Collectives:
        """Return the collectives of ``members``, whom ``whole`` connects, on their hosts."""
        levels = Levels(placement, whole, self._table, self.membership.runtime.tuning)
        if placement.memory[levels.host]:
            near = levels.inside
            local = tuple(members[member] for member in levels.local)
            # Named after its first member, who is on no other host.
            levels.inside = Inside(self._open_inside(f"host-of-{local[0]}", local), local)
            # A member that left without having come so far would be waited for inside; here it
            # is known to have left.
            near.barrier(call)
        if placement.spread is Spread.TOGETHER:
            return levels.inside
        if placement.spread is Spread.APART:
            return whole
        self._note_sums(levels, "hosts")
        return TwoLevels(levels)

    def _note_sums(self, levels: Levels, what: str) -> None:
        """Say so where ranks are numbered such that more sums than one a host cross."""
        if not levels.one_tree and self.rank == 0:
            _LOGGER.info(
                "%s: the %s' ranks %s are no equal blocks of the order of addition, so %s cross"
                " between them where one each would do; number ranks so that each has a power of"
                " two of them in a row",
                self.membership.group,
                what,
                " | ".join(str(list(ranks)) for ranks in levels.hosts),
                f"{len(levels.all_blocks)} sums",
            )

    def _open_inside(self, name: str, local: tuple[int, ...]) -> Communicator:
        communicator = self._make_inside(PartMembership.of(self.membership, name, local))
        with self._lock:
            if self.abort_reason is None:
                self._inside = communicator
                return communicator
        communicator.close()
        raise CommunicatorAbortedError(self.abort_reason)


class TwoLevels(Forwarding):
    """Every collective on ``levels``."""

    def __init__(self, levels: Levels) -> None:
        self.rank = levels.rank
        self.size = levels.size
        self._levels = levels

    @property
    def inside(self) -> Collectives:
        """The collectives of the members on this host."""
        return self._levels.inside

    def _hand_on(self, call: Call, collective: str, *arguments: Any) -> None:
        if collective not in _REDUCTIONS:
            getattr(copies, collective)(self._levels, call, *arguments)
            return
        with quiet(arguments[0]):
            getattr(reductions, collective)(self._levels, call, *arguments)
