"""``mpi://``: MPI knows the ranks; rank 0 serves the store and tells the others where."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

from transport import environment
from transport.deadline import Deadline
from transport.errors import DistError
from transport.net.auth import new_secret, secret_from_environment
from transport.net.sockets import LOOPBACK
from transport.rendezvous.address import RendezvousAddress
from transport.rendezvous.seats import in_group
from transport.rendezvous.tcp import Secret
from transport.store.base import DEFAULT_STORE_TIMEOUT, Store
from transport.store.tcp.store import TCPStore


def mpi_rendezvous(
    url: str,
    *,
    timeout: float = DEFAULT_STORE_TIMEOUT,
    group_name: str = "",
    secret: Secret = ...,
    **_: Any,
) -> Iterator[tuple[Store, int, int]]:
    """Yield a store, and rank and world size as MPI has them.

    Where the job has no secret, rank 0 makes one; it travels over MPI and is put into the
    environment, as a launcher would do. Raises ValueError when the URL's rank or world size are
    not MPI's.
    """
    from transport.mpi.library import join

    deadline = Deadline.after(timeout)
    process = join(deadline)
    address = RendezvousAddress.parse(url)
    for name, given, real in (
        ("rank", address.rank, process.rank),
        ("world_size", address.world_size, process.size),
    ):
        if given not in (-1, real):
            raise ValueError(f"{name} is {given}, but MPI says {real}; expected the same, or none")
    key = secret_from_environment() if isinstance(secret, EllipsisType) else secret
    homes = process.all_gather(_home(), deadline)
    if process.rank == 0:
        key = key or new_secret()
        host = os.environ.get(environment.HOST)
        if not host:
            host = LOOPBACK if len(set(homes)) == 1 else socket.gethostname()
        store = TCPStore(host, 0, is_master=True, timeout=timeout, secret=key)
        letter = {"host": host, "port": store.port, "secret": key.hex()}
        process.all_gather(json.dumps(letter), deadline)
    else:
        letter = json.loads(process.all_gather("", deadline)[0])
        key = bytes.fromhex(letter["secret"])
        store = TCPStore(letter["host"], letter["port"], timeout=timeout, secret=key)
    os.environ.setdefault(environment.SECRET, key.hex())
    yield in_group(store, group_name), process.rank, process.size
    raise DistError(f"{url!r} gives one rendezvous only; expected no second next()")


def _home() -> str:
    """Return what is equal for processes that reach each other over the loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
