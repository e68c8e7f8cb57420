"""``solo://``: a world of one, for debuggers, notebooks and tests of a program by itself."""

from __future__ import annotations

import logging

from transport.rendezvous.request import Request
from transport.store.base import Store
from transport.store.hash_store import HashStore

_LOGGER = logging.getLogger("meshlib.transport")


def solo_rendezvous(request: Request, why: str | None = None) -> tuple[Store, int, int]:
    """Return a store of this process's own, rank 0 and world size 1, and say in the log ``why``.

    It is a warning: a launcher that was forgotten on a cluster looks the same. Raises ValueError
    for another rank or world size in the URL.
    """
    why = why or repr(request.address.url)
    request.check_place(0, 1, f"{why} makes a world of one")
    _LOGGER.warning("a world of one, as %s asks for: no other process takes part", why)
    return HashStore(), 0, 1
