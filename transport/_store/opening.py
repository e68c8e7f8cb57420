"""Opening the store of a job whose launcher says where it is."""

from __future__ import annotations

from transport._store.base import Store
from transport._store.tcp.store import TCPStore
from transport._waiting.deadline import Timeout


def open_store(host: str, port: int, url: str, *, timeout: Timeout, secret: bytes | None) -> Store:
    """Return the store at ``url``, in an etcd; the one at ``host`` and ``port`` where that is "".

    Raises the errors of ``TCPStore``; an etcd is asked at the first call.
    """
    if not url:
        return TCPStore(host, port, timeout=timeout, secret=secret)
    from transport._store.etcd.store import EtcdStore  # HTTP is not for other jobs

    return EtcdStore(url, timeout)
