"""The object through which a group's threads find each other."""

from __future__ import annotations

import threading
from dataclasses import replace

from transport._communicators.runtime import Membership
from transport._errors import PeerLostError
from transport._inproc.frame_queue import FrameQueue
from transport._links.mailbox import Mailbox


class InprocHub:
    """The frame queues and mailboxes of a group's members, created at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._aborted: set[int] = set()
        self._left: set[int] = set()
        self._channels: dict[tuple[int, int], FrameQueue] = {}
        # The channels from and to each member, so that a leaving member need not search all.
        self._ends: dict[int, tuple[list[FrameQueue], list[FrameQueue]]] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        # All mailboxes share these two.
        self.lost: dict[int, Exception] = {}
        """The lost members, from which nothing more arrives, with the reasons."""
        self._waiting: set[Mailbox] = set()

    def join(self, membership: Membership) -> Mailbox:
        """Join as member ``membership.rank`` and return its mailbox.

        Raises ValueError if that member has already joined.
        """
        with self._lock:
            if len(self._left) == membership.size:  # All members have left: the hub is reused.
                for members in (self._joined, self._aborted, self._left, self.lost):
                    members.clear()
            if membership.rank in self._joined:
                raise ValueError(
                    f"rank {membership.rank} of group {membership.group!r} has already joined;"
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
        # Without the lock, for which all members would contend. Each of these steps is atomic, and
        # a leaving member enters ``_aborted`` or ``_left`` before it searches its channels.
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
        """Return the channels from ``rank``, and the channels to it."""
        return self._ends.get(rank) or self._ends.setdefault(rank, ([], []))

    def leave(self, membership: Membership, aborted: bool) -> None:
        """Remove the member, and wake all threads that wait for it."""
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
        """Mark a member, which need not have joined, as lost."""
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
