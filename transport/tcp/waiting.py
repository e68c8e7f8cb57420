"""Waiting for several TCP links at a time."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from transport.call import Call
from transport.errors import CommunicatorTimeoutError
from transport.tcp.frame import Incoming, Outgoing

if TYPE_CHECKING:
    from transport.tcp.link import TcpLink


def poll(
    call: Call,
    leaving: Mapping[TcpLink, Outgoing],
    coming: Mapping[TcpLink, Incoming],
    awaited: TcpLink | None,
) -> set[TcpLink]:
    """Wait until one of the links takes more of the frame that leaves there, or more comes of one
    that is coming; return those.

    Raises past the deadline, which names the link that is ``awaited``, and when a peer has hung up
    that has not received everything.
    """
    wanted: dict[int, int] = {}
    links: dict[int, TcpLink] = {}
    for link, outgoing in leaving.items():
        for sock in outgoing.waits_on(link.first):
            # If somebody hangs up who sends, reading finds out, behind what was still sent.
            wanted[sock.fileno()] = select.POLLOUT | (0 if link in coming else select.POLLRDHUP)
            links[sock.fileno()] = link
    for link, incoming in coming.items():
        for sock in incoming.waits_on(link.first):
            wanted[sock.fileno()] = wanted.get(sock.fileno(), 0) | select.POLLIN
            links[sock.fileno()] = link
    poller = select.poll()
    for descriptor, events in wanted.items():
        poller.register(descriptor, events)
    while True:
        expired = call.deadline.expired
        ready = poller.poll(math.ceil(call.deadline.piece() * 1000))
        if ready or expired:
            break
    for descriptor, events in ready:
        link = links[descriptor]
        if link not in coming and not events & select.POLLOUT:
            raise link.lost("it hung up before it had received everything")
    if not ready:
        parts = [f"{link.name} took nothing" for link in leaving]
        parts += [f"{awaited.name} sent nothing"] if awaited is not None else []
        raise CommunicatorTimeoutError(
            f"{call.header}: within {call.deadline.seconds:g} s {' and '.join(parts)}",
            (awaited or next(iter(leaving))).peer,
        )
    return {links[descriptor] for descriptor, _ in ready}


def await_readable(call: Call, sock: socket.socket, peer: int, name: str) -> None:
    """Wait until something has come on ``sock`` from ``peer``; raise past the deadline."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while not poller.poll(math.ceil(call.deadline.piece() * 1000)):
        if call.deadline.expired:
            raise CommunicatorTimeoutError(
                f"{call.header}: within {call.deadline.seconds:g} s {name} sent nothing", peer
            )
