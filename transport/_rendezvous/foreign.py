"""Rendezvous through another library's store, which the ranks already share.

Rank 0 serves the job's own store, at a free port. Only its address and the job's secret go through
the foreign store.
"""

from __future__ import annotations

import os
from typing import Any, Protocol, runtime_checkable

from transport import _environment as environment
from transport._errors import DistStoreError
from transport._net import LOOPBACK
from transport._net.sockets import is_local, local_address_towards
from transport._rendezvous.rank_claims import in_group
from transport._rendezvous.request import Secret, known_secret
from transport._store.base import DEFAULT_STORE_TIMEOUT, Store
from transport._store.prefix_store import underlying
from transport._store.tcp.store import TCPStore
from transport._tcp.meeting.address import Address, this_machine
from transport._waiting.deadline import Deadline, Timeout

_KEY = "meshlib/store"
_TURN = "meshlib/turn"


@runtime_checkable
class ForeignStore(Protocol):
    """The methods that another library's store must have: ``torch.distributed.Store`` has them.

    If it has ``host`` and ``port``, or an ``underlying_store`` with them, ranks that reach it there
    reach rank 0 by the same network.
    """

    def set(self, key: str, value: str, /) -> object:
        """Write ``value`` under ``key``."""
        ...

    def get(self, key: str, /) -> bytes:
        """Wait until ``key`` exists and return its value."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add ``amount`` to the counter under ``key`` (0 when missing); return the new value."""
        ...


def foreign_rendezvous(
    foreign: ForeignStore,
    rank: int,
    world_size: int,
    *,
    timeout: Timeout = DEFAULT_STORE_TIMEOUT,
    group_name: str = "",
    secret: Secret = ...,
) -> tuple[Store, bytes | None]:
    """Return a store of this job, and its secret, through a ``foreign`` store.

    Args:
        foreign: The store that the ranks share; the n-th call of each rank in it is one job.
        rank: This process' rank; rank 0 serves the store as long as that is open.
        world_size: The number of ranks.
        timeout: The time to wait for rank 0, and the store's timeout; seconds or a timedelta. The
            wait in the foreign store ends by that store's own timeout.
        group_name: Tells apart jobs that meet at the same place.
        secret: The job's secret, the same on all ranks; default: the environment's, else rank 0
            makes one. It passes through the foreign store, whose readers can join the job.

    Raises:
        DistStoreError: Rank 0 has not arrived.
        DistNetworkError: Its store cannot be reached.
        AuthenticationError: The secrets differ.
    """
    deadline = Deadline.after(timeout)
    part = f"{group_name}/" if group_name else ""
    turn = foreign.add(f"{part}{_TURN}/{rank}", 1)
    key = f"{part}{_KEY}/{turn}"
    known = known_secret(secret)
    if rank == 0:
        made = os.urandom(32).hex()
        mine = bytes.fromhex(made) if known is None and secret is ... else known
        store = TCPStore(
            _host_towards(foreign),
            0,
            world_size,
            is_master=True,
            timeout=deadline.remaining(),
            wait_for_workers=False,
            secret=mine,
        )
        # A secret that all ranks have from elsewhere is not published.
        token = made if mine is not known else os.urandom(16).hex()
        foreign.set(key, Address(store.host, store.port, token, this_machine()).encode().decode())
    else:
        address = Address.decode(_published(foreign, key, rank))
        address.check_reachable("rank 0")
        made_there = known is None and secret is ...
        mine = bytes.fromhex(address.token) if made_there else known
        store = TCPStore(address.host, address.port, timeout=deadline.remaining(), secret=mine)
    store.set_timeout(deadline.seconds)
    return in_group(store, group_name), mine


def _published(foreign: ForeignStore, key: str, rank: int) -> bytes:
    try:
        return bytes(foreign.get(key))
    except Exception as error:
        raise DistStoreError(
            f"rank {rank} waited in {type(foreign).__name__} for rank 0 to say where it serves the"
            f" job's store: {error}"
        ) from error


def _host_towards(foreign: ForeignStore) -> str:
    """Return the address at which those who reach ``foreign`` reach this process."""
    given = os.environ.get(environment.HOST)
    if given:
        return given
    store = underlying(foreign)
    host: Any = getattr(store, "host", None)
    if not isinstance(host, str) or not host:
        return LOOPBACK  # a file, or memory: everybody is here
    return host if is_local(host) else local_address_towards(host, int(store.port))
