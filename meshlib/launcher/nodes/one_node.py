"""The coordinator of a job on one node: it serves the store on loopback and decides alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

from meshlib.launcher.nodes.coordinator import Coordinator, Event, Placed, Placement, Verdict
from meshlib.launcher.nodes.news import announce_ends, announce_exit, tell
from meshlib.launcher.ranks.failure import RankExit
from transport.store.tcp.server import TCPStoreServer

HOST = "127.0.0.1"


class OneNode(Coordinator):
    """A job of ``ranks`` ranks, tried again up to ``max_restarts`` times.

    ``port`` 0 takes any free one, so that jobs on one machine never meet.
    """

    def __init__(self, ranks: int, max_restarts: int, port: int = 0) -> None:
        self._ranks = ranks
        self._restarts_left = max_restarts
        self._attempt = -1
        self._running = 0
        self._events: list[Event] = []
        secret = os.urandom(32)
        self._secret = secret.hex()
        self._server = TCPStoreServer(HOST, port, secret=secret)

    def join(self) -> None:
        """Place all ranks here."""
        self._attempt += 1
        self._running = self._ranks
        placement = Placement(
            attempt=self._attempt,
            node=0,
            nodes=1,
            first_rank=0,
            ranks=self._ranks,
            world_size=self._ranks,
            store_host=HOST,
            store_port=self._server.port,
            secret=self._secret,
        )
        self._events.append(Placed(placement))

    def poll(self) -> list[Event]:
        """Return what is new, in order."""
        events, self._events = self._events, []
        return events

    def failed(self, exit_: RankExit) -> None:
        """Tell the other ranks, who may be waiting for this one."""
        announce_exit(HOST, self._server.port, bytes.fromhex(self._secret), exit_)

    def finished(self, ranks: Sequence[int]) -> None:
        """Tell the other ranks, who may be waiting for these to come."""
        self._running -= len(ranks)
        if self._running:
            secret = bytes.fromhex(self._secret)
            attempt = self._attempt
            tell(HOST, self._server.port, secret, lambda s: announce_ends(s, attempt, ranks))

    def interrupted(self) -> None:
        """There is nobody to tell."""

    def ended(self, exits: Sequence[RankExit], interrupted: bool) -> None:
        """Decide whether to try again."""
        failed = any(not item.ok for item in exits)
        again = failed and not interrupted and self._restarts_left > 0
        if again:
            self._restarts_left -= 1
        self._events.append(Verdict(again, exits))

    def close(self) -> None:
        """Stop serving the store."""
        self._server.close()
