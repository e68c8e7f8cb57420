"""Waiting for several TCP links at a time."""

from __future__ import annotations

import math
import select
from collections.abc import Mapping
from typing import TYPE_CHECKING

from transport.call import Call
from transport.errors import CommunicatorTimeoutError
from transport.tcp.frame import Incoming, Outgoing

if TYPE_CHECKING:
    from transport.tcp.link import TcpLink


def poll(
    call: Call, leaving: Mapping[TcpLink, Outgoing], awaited: tuple[TcpLink, Incoming] | None
) -> None:
    """Wait until one of the links takes more of the frame that leaves there, or more comes of the
    one that is ``awaited``.

    Raises past the deadline, and when a peer has hung up that has not received everything.
    """
    source, incoming = awaited or (None, None)
    wanted: dict[int, int] = {}
    links: dict[int, TcpLink] = {}
    for link, outgoing in leaving.items():
        for sock in outgoing.waits_on(link.first):
            # If the source hangs up, reading finds out, behind what it has still sent.
            wanted[sock.fileno()] = select.POLLOUT | (0 if link is source else select.POLLRDHUP)
            links[sock.fileno()] = link
    if source is not None and incoming is not None:
        for sock in incoming.waits_on(source.first):
            wanted[sock.fileno()] = wanted.get(sock.fileno(), 0) | select.POLLIN
    poller = select.poll()
    for descriptor, events in wanted.items():
        poller.register(descriptor, events)
    while True:
        expired = call.deadline.expired
        ready = poller.poll(math.ceil(call.deadline.piece() * 1000))
        if ready or expired:
            break
    for descriptor, events in ready:
        link = links.get(descriptor)
        if link not in (None, source) and not events & select.POLLOUT:
            raise link.lost("it hung up before it had received everything")
    if not ready:
        parts = [f"{link.name} took nothing" for link in leaving]
        parts += [f"{source.name} sent nothing"] if source is not None else []
        raise CommunicatorTimeoutError(
            f"{call.header}: within {call.deadline.seconds:g} s {' and '.join(parts)}",
            (source or next(iter(leaving))).peer,
        )
