"""``tcp://`` with a multicast address, for processes that know only the multicast group.

Every process announces itself. If no process has announced a store for a moment, the process with
the smallest identity serves one and announces it; the others join. If datagrams were lost, two
processes may serve. The one with the greater identity then stops serving once it receives the
other's announcement, and its members search again. Ranks use a store only after all ``world_size``
processes have joined it, so only one store is ever used, and its server does not stop afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence

from transport import _environment as environment
from transport._errors import DistNetworkError, DistStoreError, StoreTimeoutError
from transport._rendezvous.announcements import Announcement, MulticastSocket, new_identity
from transport._rendezvous.request import RendezvousRequest
from transport._store.base import Store
from transport._store.tcp.store import TCPStore

_ANNOUNCE_SECONDS = 0.03
_SETTLE_SECONDS = 0.3
_CONNECT_SECONDS = 3.0
_COUNT, _MEMBER, _RANKS = "rendezvous/count", "rendezvous/member", "rendezvous/ranks"
_SIZE = "rendezvous/size"
_ERROR_READ = "rendezvous/error-read"


def multicast_rendezvous(request: RendezvousRequest) -> tuple[Store, int, int]:
    """Return the store, the rank and the world size of the job in the multicast group.

    Processes without a rank get the free ranks, in the order of arrival.

    Raises StoreTimeoutError if not all processes arrive in time, DistStoreError if their ranks or
    world sizes are inconsistent, DistNetworkError if this machine has no route to the group.
    """
    secret = request.secret
    request.check_place(rank_needed=False)
    interface = os.environ.get(environment.HOST) or None
    multicast = MulticastSocket(request.host, request.port, request.group_name, secret, interface)
    try:
        store, rank = _StoreSearch(request, multicast, secret).run()
    finally:
        multicast.close()
    store.set_timeout(request.timeout)
    return store, rank, request.world_size


class _StoreSearch:
    """One process's search for the job's store."""

    def __init__(
        self, request: RendezvousRequest, multicast: MulticastSocket, secret: bytes | None
    ) -> None:
        self._where = request.url
        self._rank = request.rank
        self._world_size = request.world_size
        self._multicast = multicast
        self._secret = secret
        self._deadline = request.deadline()
        self._own = Announcement(request.group_name, new_identity())
        # Identities whose store could not be joined are ignored until these times.
        self._avoided: dict[str, float] = {}

    def run(self) -> tuple[Store, int]:
        """Return the store and this process' rank."""
        while True:
            host = self._find_host()
            found = self._serve() if host is None else self._join(host)
            if found is not None:
                return found

    def _find_host(self) -> Announcement | None:
        """Return the announcement of a serving process, or None if this process should serve."""
        candidates: dict[str, float] = {}
        hosts: list[Announcement] = []

        def handle(announcement: Announcement) -> bool:
            if announcement.port == 0:
                candidates[announcement.identity] = time.monotonic()
            elif self._avoided.get(announcement.identity, 0.0) < time.monotonic():
                hosts.append(announcement)
            return bool(hosts)

        begin = time.monotonic()
        while True:
            self._check_deadline("a process that serves the store")
            self._multicast.send(self._own)
            self._multicast.receive(_ANNOUNCE_SECONDS, handle)
            if hosts:
                return hosts[0]
            now = time.monotonic()
            alive = [name for name, at in candidates.items() if now - at < _SETTLE_SECONDS]
            if now - begin >= _SETTLE_SECONDS and min(alive, default="") >= self._own.identity:
                return None

    def _serve(self) -> tuple[Store, int] | None:
        """Serve until all processes have joined; return None if another should serve instead."""
        store = TCPStore(
            self._multicast.listen_host or "::",
            0,
            is_master=True,
            timeout=max(self._deadline.remaining(), 1.0),
            secret=self._secret,
        )
        own = Announcement(
            self._own.group, self._own.identity, self._multicast.announced_host, store.port
        )
        rivals: list[Announcement] = []

        def handle(announcement: Announcement) -> bool:
            if announcement.port and announcement.identity < own.identity:
                rivals.append(announcement)
            return bool(rivals)

        enrolled = False
        try:
            number = self._enroll(store)
            # If ``_RANKS`` is set before all members have arrived, it holds an error.
            while not store.check([_RANKS]):
                if store.check([f"{_MEMBER}/{self._world_size}"]):
                    self._assign(store)
                    break
                self._check_deadline(f"{self._world_size} processes", store)
                self._multicast.send(own)
                self._multicast.receive(_ANNOUNCE_SECONDS, handle)
                if rivals:
                    return None
            rank = self._read_rank(store, number)
            enrolled = True
            return store, rank
        except _MisfitError:
            # Keep the store open until the other processes have read the error.
            with contextlib.suppress(DistStoreError):
                store.tail(_ERROR_READ, int(store.get(_COUNT)) - 1, timeout=_CONNECT_SECONDS)
            raise
        finally:
            if not enrolled:
                store.close()

    def _join(self, host: Announcement) -> tuple[Store, int] | None:
        """Join another process's store; return None if it ended before all had arrived."""
        store: TCPStore | None = None
        enrolled = False
        try:
            store = TCPStore(
                host.host,
                host.port,
                timeout=min(self._deadline.remaining(), _CONNECT_SECONDS),
                secret=self._secret,
            )
            store.set_timeout(max(self._deadline.remaining(), 0.001))
            number = self._enroll(store)
            if number > self._world_size:
                raise _MisfitError(
                    f"{self._where}: world_size={self._world_size} processes have joined"
                    " already; this one is too many"
                )
            rank = self._read_rank(store, number)
            enrolled = True
            return store, rank
        except (DistStoreError, DistNetworkError) as error:
            if isinstance(error, StoreTimeoutError | _MisfitError):
                raise
            self._avoided[host.identity] = time.monotonic() + 1.0
            self._check_deadline("a process that serves the store")
            return None
        finally:
            if store is not None and not enrolled:
                store.close()

    def _enroll(self, store: Store) -> int:
        number = store.add(_COUNT, 1)
        # Members write their keys in order, so the last key shows that all have arrived.
        if number > 1:
            store.wait([f"{_MEMBER}/{number - 1}"])
        size = str(self._world_size).encode()
        others = store.compare_set(_SIZE, b"", size)
        if others != size:
            sizes = f"{others.decode()} and {self._world_size}"
            store.set(_RANKS, json.dumps({"error": f"world_size differs: {sizes}"}))
        store.set(f"{_MEMBER}/{number}", str(self._rank))
        return number

    def _assign(self, store: Store) -> None:
        keys = [f"{_MEMBER}/{number}" for number in range(1, self._world_size + 1)]
        ranks = [int(value) for value in store.multi_get(keys)]
        store.compare_set(_RANKS, b"", json.dumps(_fill(ranks)))

    def _read_rank(self, store: Store, number: int) -> int:
        answer = json.loads(store.get(_RANKS))
        if "error" in answer:
            store.append(_ERROR_READ, ".")
            raise _MisfitError(f"{self._where}: {answer['error']}")
        return answer["ranks"][number - 1]

    def _check_deadline(self, what: str, store: Store | None = None) -> None:
        if self._deadline.expired:
            arrived = f"; {int(store.get(_COUNT))} arrived" if store is not None else ""
            raise StoreTimeoutError(
                f"{self._where}: waited {self._deadline.seconds:g} s for {what}{arrived}"
            )


class _MisfitError(DistStoreError):
    """The ranks, world sizes or number of the processes are inconsistent."""


def _fill(ranks: Sequence[int]) -> dict[str, object]:
    """Return the ranks, with each -1 replaced by a free rank, or an error for duplicates."""
    given = [rank for rank in ranks if rank >= 0]
    twice = sorted({rank for rank in given if given.count(rank) > 1})
    if twice:
        return {"error": f"several processes have the same rank: {twice}"}
    free = iter(sorted(set(range(len(ranks))) - set(given)))
    return {"ranks": [rank if rank >= 0 else next(free) for rank in ranks]}
