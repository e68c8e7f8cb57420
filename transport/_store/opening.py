"""Opening the store of a job, whose address the launcher sets."""

from __future__ import annotations

from transport._store.base import Store
from transport._store.tcp.store import TCPStore
from transport._waiting.deadline import Timeout


def open_store(host: str, port: int, url: str, *, timeout: Timeout, secret: bytes | None) -> Store:
    """Return the store in the etcd at ``url``; if ``url`` is "", the one at ``host`` and ``port``.

    Raises the errors of ``TCPStore``. An etcd is not contacted before the first call.
    """
    if not url:
        return TCPStore(host, port, timeout=timeout, secret=secret)
    from transport._store.etcd.store import EtcdStore  # imports HTTP, which other jobs do not need

    return EtcdStore(url, timeout)
