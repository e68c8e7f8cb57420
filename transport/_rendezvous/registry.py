"""The registry of rendezvous methods: URL schemes and their handlers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from transport._errors import DistError
from transport._rendezvous.env import env_rendezvous
from transport._rendezvous.mpi import mpi_rendezvous
from transport._rendezvous.plain import file_rendezvous, solo_rendezvous, tcp_rendezvous
from transport._rendezvous.request import RendezvousRequest, Secret, with_place
from transport._store.base import DEFAULT_STORE_TIMEOUT, Store
from transport._waiting.deadline import Timeout, to_seconds

RendezvousHandler = Callable[..., Iterator[tuple[Store, int, int]]]
"""Called as ``handler(url, timeout=seconds, group_name=..., secret=..., **others)``. A given rank
or world size is in the URL's query. Yields (store, rank, world size).
"""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


def _handler(meet: Callable[[RendezvousRequest], tuple[Store, int, int]]) -> RendezvousHandler:
    """Return a handler for a built-in method; it yields once."""

    def handle(
        url: str, *, timeout: float, group_name: str, secret: Secret, **_: Any
    ) -> Iterator[tuple[Store, int, int]]:
        yield meet(RendezvousRequest.parse(url, timeout, group_name, secret))
        raise DistError(f"{url!r} supports only one rendezvous; expected no second next()")

    return handle


_HANDLERS: dict[str, RendezvousHandler] = {
    "env": _handler(env_rendezvous),
    "mpi": _handler(mpi_rendezvous),
    "file": _handler(file_rendezvous),
    "solo": _handler(solo_rendezvous),
    "tcp": _handler(tcp_rendezvous),
}


def register_rendezvous_handler(scheme: str, handler: RendezvousHandler) -> None:
    """Register ``handler`` for URLs that begin with ``scheme://``; case does not matter.

    It is called as ``handler(url, timeout=seconds, group_name=..., secret=..., **others)`` and
    yields (store, rank, world size). Raises ValueError if the scheme is invalid or already
    registered, TypeError for a handler that is not callable.
    """
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"scheme must be a URL's scheme such as 'tcp', got {scheme!r}")
    if not callable(handler):
        raise TypeError(f"handler must be callable, got {type(handler).__name__}: {handler!r}")
    key = scheme.lower()
    if key in _HANDLERS:
        raise ValueError(f"scheme {scheme!r} is already registered; expected a new one")
    _HANDLERS[key] = handler


def rendezvous(
    url: str,
    rank: int = -1,
    world_size: int = -1,
    *,
    timeout: Timeout = DEFAULT_STORE_TIMEOUT,
    group_name: str = "",
    secret: Secret = ...,
    **others: Any,
) -> Iterator[tuple[Store, int, int]]:
    """Return an iterator over (store, rank, world size); use its first item.

    Args:
        url: The meeting point of the ranks: ``env://``, ``tcp://host:port``, ``file:///path``,
            ``solo://`` (alone), or a registered scheme.
        rank: This process' rank; -1: from the URL, the environment, or assigned.
        world_size: The number of ranks; -1: from the URL or the environment.
        timeout: The time to wait for the other ranks, and the store's timeout; seconds or a
            timedelta.
        group_name: Distinguishes jobs at the same meeting point.
        secret: The job's secret; default: from the environment.
        others: Passed to the handler of a registered scheme.

    Raises ValueError for an unknown scheme, TypeError for an argument of a wrong type. The first
    ``next`` raises the handlers' errors: ValueError for an incomplete URL, ``DistStoreError`` if
    ranks are missing at the deadline, ``DistNetworkError`` if the store cannot be reached.
    """
    if not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"url must be a str, got {type(url).__name__}: {url!r}")
    scheme = urlsplit(url).scheme
    handler = _HANDLERS.get(scheme)
    if handler is None:
        known = ", ".join(f"{name}://" for name in sorted(_HANDLERS))
        raise ValueError(f"scheme {scheme!r} of {url!r} is unknown; expected one of {known}")
    return handler(
        with_place(url, rank, world_size),
        timeout=to_seconds(timeout),
        group_name=group_name,
        secret=secret,
        **others,
    )
