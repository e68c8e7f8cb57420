"""Ports for tests whose processes or threads have to know one before anybody listens on it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the kernel gives to nobody who asks for any, until the end of this.

    A socket that is bound and does not listen keeps it: connections to it are refused, and our
    listeners may bind it beside that, since they let ports be used again.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            keeper.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        keeper.bind(("", 0))
        yield keeper.getsockname()[1]
