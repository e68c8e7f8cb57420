"""Rendezvous through another library's store, which the ranks already share.

Rank 0 serves the job's own store on a free port. Only the address and the job's secret pass through
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
_GENERATION = "meshlib/turn"


@runtime_checkable
class ForeignStore(Protocol):
    """The methods that another library's store must have, as ``torch.distributed.Store`` does.

    If the store, or its ``underlying_store``, has ``host`` and ``port``, rank 0 uses the same
    network.
    """

    def set(self, key: str, value: str, /) -> object:
        """Write ``value`` under ``key``."""
        ...

    def get(self, key: str, /) -> bytes:
        """Wait until ``key`` exists and return its value."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add ``amount`` to the counter under ``key``, initially 0; return the new value."""
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
        foreign: The store that the ranks share. The n-th calls of all ranks belong to one job.
        rank: This process' rank. Rank 0 serves the store until it closes the store.
        world_size: The number of ranks.
        timeout: The time to wait for rank 0, and the store's timeout; seconds or a timedelta. A
            wait in the foreign store has that store's own timeout.
        group_name: Distinguishes jobs in the same foreign store.
        secret: The job's secret, the same on all ranks. The default is the environment's secret,
            else a new one, which passes through the foreign store: its readers can join the job.

    Raises:
        DistStoreError: If rank 0 has not arrived.
        DistNetworkError: If the store of rank 0 cannot be reached.
        AuthenticationError: If the secrets differ.
    """
    deadline = Deadline.after(timeout)
    part = f"{group_name}/" if group_name else ""
    generation = foreign.add(f"{part}{_GENERATION}/{rank}", 1)
    key = f"{part}{_KEY}/{generation}"
    known = known_secret(secret)
    if rank == 0:
        made = os.urandom(32).hex()
        job_secret = bytes.fromhex(made) if known is None and secret is ... else known
        store = TCPStore(
            _host_towards(foreign),
            0,
            world_size,
            is_master=True,
            timeout=deadline.remaining(),
            wait_for_workers=False,
            secret=job_secret,
        )
        # A secret that all ranks already know is not published.
        token = made if job_secret is not known else os.urandom(16).hex()
        foreign.set(key, Address(store.host, store.port, token, this_machine()).encode().decode())
    else:
        address = Address.decode(_published(foreign, key, rank))
        address.check_reachable("rank 0")
        made_there = known is None and secret is ...
        job_secret = bytes.fromhex(address.token) if made_there else known
        store = TCPStore(
            address.host, address.port, timeout=deadline.remaining(), secret=job_secret
        )
    store.set_timeout(deadline.seconds)
    return in_group(store, group_name), job_secret


def _published(foreign: ForeignStore, key: str, rank: int) -> bytes:
    try:
        return bytes(foreign.get(key))
    except Exception as error:
        raise DistStoreError(
            f"rank {rank} waited in {type(foreign).__name__} for the address of rank 0's"
            f" store: {error}"
        ) from error


def _host_towards(foreign: ForeignStore) -> str:
    """Return this process' address on the network of ``foreign``."""
    given = os.environ.get(environment.HOST)
    if given:
        return given
    store = underlying(foreign)
    host: Any = getattr(store, "host", None)
    if not isinstance(host, str) or not host:
        return LOOPBACK  # In a file or in memory, so all ranks are on this host.
    return host if is_local(host) else local_address_towards(host, int(store.port))
