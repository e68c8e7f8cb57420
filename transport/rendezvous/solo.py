"""``solo://``: a world of one, for debuggers, notebooks and tests of a program by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from transport.errors import DistError
from transport.rendezvous.address import RendezvousAddress
from transport.store.base import Store
from transport.store.hash_store import HashStore

_LOGGER = logging.getLogger("meshlib.transport")


def solo_rendezvous(
    url: str, *, why: str | None = None, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Yield a store of this process's own, rank 0 and world size 1, and say in the log ``why``.

    It is a warning: a launcher that was forgotten on a cluster looks the same. Raises ValueError
    for another rank or world size in the URL.
    """
    address = RendezvousAddress.parse(url)
    why = why or repr(url)
    for name, given, real in (("rank", address.rank, 0), ("world_size", address.world_size, 1)):
        if given not in (-1, real):
            raise ValueError(f"{name} is {given}, but {why} makes a world of one; expected {real}")
    _LOGGER.warning("a world of one, as %s asks for: no other process takes part", why)
    yield HashStore(), 0, 1
    raise DistError(f"{url!r} gives one rendezvous only; expected no second next()")
