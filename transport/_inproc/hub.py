"""The object in which a group's threads meet."""

from __future__ import annotations

import threading
from dataclasses import replace

from transport._communicators.runtime import Membership
from transport._errors import PeerLostError
from transport._inproc.frame_queue import FrameQueue
from transport._links.mailbox import Mailbox


class InprocHub:
    """The meeting point of a group's members: channels and mailboxes, made at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._aborted: set[int] = set()
        self._left: set[int] = set()
        self._channels: dict[tuple[int, int], FrameQueue] = {}
        # Each member's channels, so that a leaving member need not search all.
        self._ends: dict[int, tuple[list[FrameQueue], list[FrameQueue]]] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        # Lost members with their reasons, and waiting threads: shared by all mailboxes.
        self.lost: dict[int, Exception] = {}
        """The lost members: nothing more arrives from them."""
        self._waiting: set[Mailbox] = set()

    def join(self, membership: Membership) -> Mailbox:
        """Enter as the member ``membership.rank`` and return its mailbox."""
        with self._lock:
            if len(self._left) == membership.size:  # everybody has closed: start afresh
                for members in (self._joined, self._aborted, self._left, self.lost):
                    members.clear()
            if membership.rank in self._joined:
                raise ValueError(
                    f"rank {membership.rank} of group {membership.group!r} has joined already;"
                    " expected one communicator for each rank"
                )
            self._joined.add(membership.rank)
        return self.mailbox(membership, membership.rank)

    def mailbox(self, membership: Membership, rank: int) -> Mailbox:
        """Return the mailbox of member ``rank``, which need not have joined yet."""
        with self._lock:
            box = self._mailboxes.get(rank)
            if box is None:
                place = replace(membership, rank=rank)
                box = self._mailboxes[rank] = Mailbox(place, lost=self.lost, waiting=self._waiting)
            return box

    def channel(self, src: int, dst: int, eager: int) -> FrameQueue:
        """Return the channel from ``src`` to ``dst``."""
        channel = self._channels.get((src, dst))
        if channel is not None:
            return channel
        made = FrameQueue(eager)
        # Without the lock, which all members would want at once. Each of these steps is atomic,
        # and a leaving member is in a set before it looks for its channels.
        channel = self._channels.setdefault((src, dst), made)
        if channel is made:
            self._ends_of(src)[0].append(channel)
            self._ends_of(dst)[1].append(channel)
            if src in self._aborted or dst in self._aborted:
                channel.cut()
            if src in self._left:
                channel.leave(as_sender=True)
            if dst in self._left:
                channel.leave(as_sender=False)
        return channel

    def _ends_of(self, rank: int) -> tuple[list[FrameQueue], list[FrameQueue]]:
        """Return the channels that lead away from ``rank``, and those that lead there."""
        return self._ends.get(rank) or self._ends.setdefault(rank, ([], []))

    def leave(self, membership: Membership, aborted: bool) -> None:
        """Take the member out, waking all threads that wait for it."""
        rank = membership.rank
        how = "aborted" if aborted else "closed its communicator"
        error = PeerLostError(f"{membership.describe(rank)} {how}", rank)
        with self._lock:
            (self._aborted if aborted else self._left).add(rank)
            outward, inward = map(list, self._ends_of(rank))
            for channels, as_sender in ((outward, True), (inward, False)):
                for channel in channels:
                    if aborted:
                        channel.cut()
                    else:
                        channel.leave(as_sender)
            self._lose(rank, error)
            if len(self._left) == membership.size:
                self._channels.clear()
                self._ends.clear()
                self._mailboxes.clear()

    def lose(self, rank: int, error: Exception) -> None:
        """Mark a member, which need not have joined, as lost: nothing more arrives from it."""
        with self._lock:
            self._lose(rank, error)

    def _lose(self, rank: int, error: Exception) -> None:
        if rank in self.lost:
            return
        self.lost[rank] = error
        # A waiting mailbox enters the set before it checks for lost members.
        own = self._mailboxes.get(rank)
        for box in list(self._waiting):
            if box is not own:
                box.fail(rank, error)
