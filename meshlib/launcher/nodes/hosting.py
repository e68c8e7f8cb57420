"""Which of several nodes serves the job's store."""

from __future__ import annotations

from meshlib.launcher.options.launch import NodeOptions
from transport.errors import DistNetworkError
from transport.net.sockets import is_local
from transport.store.tcp.server import TCPStoreServer


def serve_if_ours(options: NodeOptions, secret: bytes | None) -> TCPStoreServer | None:
    """Return the store's server if it is this node that has to serve it.

    Raises DistNetworkError when it must and cannot.
    """
    wish = options.config["is_host"]
    if wish == 0 or (wish < 0 and options.rank not in (None, 0)):
        return None
    must = wish == 1 or options.rank == 0
    if not must and not is_local(options.host):
        return None
    try:
        return TCPStoreServer(options.host, options.port, secret=secret)
    except DistNetworkError:
        if not must:
            return None  # another agent on this machine was first
        if secret is None or is_local(options.host):
            raise
    # The address leads here by some translation on the way: a service, a container's host.
    return TCPStoreServer("", options.port, secret=secret)
