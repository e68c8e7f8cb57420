"""The state that all communicators of a rank share: names, addresses and resources."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from transport._choosing.tuning import Tuning, shipped
from transport._net.fork import Closable
from transport._operands.compression import Compression
from transport._place import Place
from transport._store.base import Store

if TYPE_CHECKING:
    from transport._net.tls import Tls


C = TypeVar("C", bound=Closable)


class Runtime:
    """The transport-level state of one rank (of one World), passed to each communicator.

    ``secret`` is the job's secret or None. ``host`` is the address or name at which peers reach
    this rank; None means the address of the interface that leads to the store. With ``tls``, all
    TCP connections use TLS. ``tuning`` (default: the shipped one) chooses the algorithms and must
    be equal on all ranks.
    """

    def __init__(
        self,
        secret: bytes | None = None,
        host: str | None = None,
        tls: Tls | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.secret = secret
        self.host = host
        self.tls = tls
        self.tuning = tuning or shipped()
        self._lock = threading.Lock()
        self._shared: dict[str, Closable] = {}
        self._noted: set[str] = set()
        self._closed = False

    def shared(self, key: str, factory: Callable[[], C]) -> C:
        """Return the resource under ``key``, made by ``factory`` at the first call."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"resource {key!r} was requested after this rank closed")
            if key not in self._shared:
                self._shared[key] = factory()
            return cast(C, self._shared[key])

    def note_once(self, text: str) -> bool:
        """Return True at the first call with ``text``, to show a message only once."""
        with self._lock:
            first = text not in self._noted
            self._noted.add(text)
            return first

    def close(self) -> None:
        """Close all resources, newest first. Idempotent."""
        with self._lock:
            self._closed = True
            shared = list(self._shared.values())
            self._shared.clear()
        for resource in reversed(shared):
            resource.close()


@dataclass(frozen=True, slots=True)
class Membership:
    """One rank's place in one group, with all that a transport needs to make a communicator.

    ``group`` is unique in the job and equal on all members; keys of ``store`` are already prefixed
    with it. ``ranks`` lists the members' global ranks, for messages. ``places`` lists the members'
    places, or is empty if they are unknown. ``compression`` is the format of large reductions
    between hosts (None: uncompressed), the same on all members.
    """

    group: str
    rank: int
    ranks: tuple[int, ...]
    store: Store
    runtime: Runtime
    compression: Compression | None = None
    places: tuple[Place, ...] = ()

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def describe(self, peer: int) -> str:
        """Return the name of member ``peer`` for messages: its global rank, and the group rank if
        the two differ.
        """
        rank = self.ranks[peer]
        return f"rank {rank}" if rank == peer else f"rank {rank} (rank {peer} of the group)"
