"""The transport that chooses: shared memory among members on one host, TCP between hosts."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from transport import _environment as environment
from transport._call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.base import Collectives, Communicator
from transport._communicators.forwarding import Forwarding
from transport._communicators.runtime import Membership
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistError,
    PeerLostError,
)
from transport._hierarchical import HierarchicalCommunicator
from transport._hierarchical.hosts import Placement
from transport._links.communicator import LinkCommunicator
from transport._operands.reduce_op import Flat
from transport._place import Place, this_place
from transport._shm import ShmCommunicator, unsupported_reason
from transport._shm.meeting.directory import Directory
from transport._shm.sizes import DEFAULT_SIZES, Sizes
from transport._tcp import TcpCommunicator

_LOGGER = logging.getLogger("meshlib.transport")
_YES, _NO = b"yes", b"no"


class AutoCommunicator(Forwarding, Communicator):
    """Collectives through shared memory when all members really share a host, else on two levels:
    inside hosts by shared memory, between them by TCP. Messages go by shared memory between
    members that share a host, by TCP between others.

    All members together decide at the first collective whether they share memory. Each needs the
    same boot id and network namespace, and must receive a descriptor; if one cannot, none does.
    ``host`` is this rank's assumed host (default: its real one).
    """

    def __init__(
        self,
        membership: Membership,
        table: Thresholds | None = None,
        sizes: Sizes = DEFAULT_SIZES,
        host: Place | None = None,
    ) -> None:
        super().__init__(membership)
        self._table = table
        # Guards what an abort from another thread must find.
        self._lock = threading.Lock()
        self._near: ShmCommunicator | None = None
        self._far: LinkCommunicator | None = None
        self._levels: HierarchicalCommunicator | None = None
        self._chosen: Communicator | None = None
        # What carries messages, by peer.
        self._ways: dict[int, Communicator] = {}
        machine = host.machine if host is not None else None
        obstacle = unsupported_reason()
        if obstacle is None:
            self._near = ShmCommunicator(membership, sizes, machine)
            self._near.mailbox.shared = True
            self._directory: Directory = self._near.neighbourhood
        else:
            # One rank of the host is enough.
            is_first = os.environ.get(environment.LOCAL_RANK, "0") == "0"
            if is_first and membership.runtime.note_once(obstacle):
                _LOGGER.warning("ranks of this host use TCP: %s", obstacle)
            self._directory = Directory(membership, this_place(obstacle, machine=machine))
            self._directory.publish()

    # Collectives.

    def _hand_on(self, call: Call, collective: str, *arguments: Any) -> None:
        chosen = self._chosen or self._choose(call)
        # All later ones go there directly: this way costs a microsecond, much of a small call.
        for name in Collectives.__abstractmethods__:
            setattr(self, name, getattr(chosen, name))
        getattr(chosen, collective)(call, *arguments)

    def takes_gaps(self, call: Call) -> bool:
        return (self._chosen or self._choose(call)).takes_gaps(call)

    def allocate(self, call: Call, count: int, dtype: np.dtype[np.generic]) -> Flat:
        return (self._chosen or self._choose(call)).allocate(call, count, dtype)

    def outline(self) -> Any:
        return None if self._chosen is None else self._chosen.outline()

    def message_rings(self) -> tuple[Any, ...] | None:
        return None if self._near is None else self._near.message_rings()

    def lend_rings(self, peer: int) -> tuple[Any, ...] | None:
        near = self._near
        return near.lend_rings(peer) if near is not None and self._ways.get(peer) is near else None

    def resume(self, call: Call, status: int) -> None:
        (self._chosen or self._choose(call)).resume(call, status)

    # Point to point.

    def send(self, call: Call, buffer: Flat, dst: int, tag: int) -> None:
        self._towards(dst, call).send(call, buffer, dst, tag)

    def takes_at_once(self, dst: int, nbytes: int) -> bool:
        # A member on another host has no ring there.
        return self._near is not None and self._near.takes_at_once(dst, nbytes)

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        if src is None:
            # All messages come to one mailbox; TCP must listen for those who may use it.
            peers = [peer for peer in range(self.size) if peer != self.rank]
            near, directory = self._near, self._directory
            if near is not None and all(
                directory.find(peer) is not None and directory.is_near(peer, call) for peer in peers
            ):
                return near.recv(call, buffer, src, tag)
            return self._open_far().recv(call, buffer, src, tag)
        return self._towards(src, call).recv(call, buffer, src, tag)

    def lose(self, peer: int, reason: str) -> None:
        near, place = self._near, self._directory.find(peer)
        if near is not None and (place is None or self._directory.place.may_share_with(place)):
            near.lose(peer, reason)
        elif self.abort_reason is None:
            # Not by way of the memory, which knows nothing of what is on its way by TCP.
            with suppress(CommunicatorAbortedError):
                self._open_far().lose(peer, reason)

    @property
    def receiving(self) -> bool:
        return any(part is not None and part.receiving for part in (self._near, self._far))

    def left_over(self) -> list[str]:
        # Where both are, they share a mailbox.
        part = self._near or self._far
        return [] if part is None else part.left_over()

    # The end.

    def abort(self, reason: str) -> None:
        for part in self._stop(reason):
            part.abort(reason)

    def close(self) -> None:
        for part in self._stop("the communicator was closed"):
            part.close()

    def _stop(self, reason: str) -> list[Communicator]:
        with self._lock:
            if self.abort_reason is None:
                self.abort_reason = reason
            parts = [self._levels or self._far, self._near]
        self._directory.cancel(reason)
        return [part for part in parts if part is not None]

    # Choosing.

    def _towards(self, peer: int, call: Call) -> Communicator:
        """Return what carries messages between this rank and ``peer``."""
        way = self._ways.get(peer)
        if way is None:
            near = self._near
            is_near = near is not None and self._directory.is_near(peer, call)
            way = self._ways[peer] = near if near is not None and is_near else self._open_far()
        return way

    def _open_far(self) -> LinkCommunicator:
        """Return the TCP communicator of the group, made at the first use."""
        with self._lock:
            self.check_open()
            if self._far is None:
                mailbox = None if self._near is None else self._near.mailbox
                self._far = TcpCommunicator(self.membership, self._table, mailbox)
            return self._far

    def _choose(self, call: Call) -> Communicator:
        self.check_open()
        peers = [peer for peer in range(self.size) if peer != self.rank]
        near = self._near
        places = self._directory.look_up_all(call)
        if near is not None and all(self._directory.is_near(peer, call) for peer in peers):
            vote = self._try_near(near, call)
            key = "shares-memory/{}".format
            self.membership.store.set(key(self.rank), vote)
            votes = self._directory.read_all(key, peers, call)
            if vote == _YES and set(votes.values()) <= {_YES}:
                self._chosen = near
                return near
            # They are on one host, and yet not all can share memory.
            obstacle = "not all members on its host can share memory"
            places = [replace(place, obstacle=obstacle) for place in places]
        return self._open_levels(Placement.of(places))

    def _try_near(self, near: ShmCommunicator, call: Call) -> bytes:
        try:
            near.meet(call)
        except (PeerLostError, CommunicatorAbortedError, CommunicatorTimeoutError):
            raise
        except (DistError, OSError) as error:
            _LOGGER.warning("%s uses TCP inside one host: %s", self.membership.group, error)
            return _NO
        return _YES

    def _open_levels(self, placement: Placement) -> Communicator:
        far = self._open_far()
        levels = HierarchicalCommunicator(
            self.membership,
            self._table,
            across=lambda _membership, _table: far,
            placement=placement,
        )
        with self._lock:
            if self.abort_reason is None:
                self._levels = self._chosen = levels
                return levels
        levels.close()
        raise CommunicatorAbortedError(self.abort_reason)
