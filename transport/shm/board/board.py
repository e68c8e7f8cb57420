"""The board: where the members of a group see which call each is in, and how far.

Each member has a counter that only it writes and that only rises: the number of its call, and in
the low bits a step within that call. A member that sees a peer's counter at a step sees everything
that the peer wrote before (x86-64 keeps stores in order). Nothing is ever reset, so nothing can be
missed.

A member's cards say which call it is in (``Call.packed``) and hold notes about it. Everybody
compares everybody's card with its own: at once where it waits for that member anyway, else in the
next call in which all meet, at the latest before its next call but one. Cards and blocks are used
in rotation. When a member begins a call, all others have begun the call before the last one; so
what a call of one block put into its block may be overwritten three calls later with nothing to
wait for. A call of several blocks ends with the step ``DONE``, and later calls wait for that before
they use its blocks again; unless its last meeting shows that nobody uses another's blocks any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from transport.call import HEADER_BYTES, Call, CallHeader
from transport.communicators.runtime import Membership
from transport.errors import HeaderMismatchError, PeerLostError
from transport.native import core
from transport.operands.reduce_op import Flat
from transport.shm.board.futex import Fence
from transport.shm.board.layout import BLOCKS, CARDS, WORD, Layout
from transport.shm.board.patience import Patience, sleep
from transport.shm.board.segment import LINE, Segment

_STEP_BITS = 24
_CALL = 1 << _STEP_BITS
DONE = _CALL - 1
_FIRST = 1
_TO_THE_ONE_BEFORE = _CALL - _FIRST
"""From where a call begins back to the first step of the one before it."""

Check = Callable[[Call, int], None]
"""Raises when waiting for a member (a group rank) in a call has become pointless."""


class _Progress:
    """How far a member is. The compiled core has the same, in its own board.

    The ``number`` of the call; the turn at which it begins (``base``); a turn that all members
    have come to (``floor``); one that they must have come to before blocks are used again
    (``busy``); and how many calls have cards that are still to be compared (``unchecked``).
    """

    __slots__ = ("base", "busy", "floor", "number", "unchecked")

    def __init__(self) -> None:
        self.number = self.base = self.floor = self.busy = self.unchecked = 0


class Board:
    """One member's view of the board. One thread at a time, except for ``wake_all``.

    ``compiled`` is this board as the compiled core has it; None where it is not for that: ranks
    that share a process must sleep while they wait.
    """

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        membership: Membership,
        patience: Patience,
        check: Check,
    ) -> None:
        self.segment = segment
        self.layout = layout
        self.size = layout.size
        self.rank = rank = membership.rank
        self.peers = [peer for peer in range(self.size) if peer != rank]
        self._notes_at = [
            [(layout.card(r, slot) + HEADER_BYTES) // WORD for slot in range(CARDS)]
            for r in range(self.size)
        ]
        self.words = segment.words
        self._membership = membership
        self._patience = patience
        self._check = check
        self._futex = segment.futex
        fence = Fence().lock
        self._take_fence, self._drop_fence = fence.acquire, fence.release
        self._counters = [layout.counter(r) // WORD for r in range(self.size)]
        self._mine = self._counters[rank]
        first = layout.sleepers // WORD
        self._sleeper_words = range(first, first + -(-self.size // WORD))
        self._first_sleepers = first
        self._few = self.size <= WORD
        # Slices of the mapping, which gives and takes bytes in less time than a view of it.
        self._memory = segment.mapping
        self._cards = [
            [
                slice(layout.card(r, slot), layout.card(r, slot) + HEADER_BYTES)
                for slot in range(CARDS)
            ]
            for r in range(self.size)
        ]
        self._blocks: dict[int, list[list[Flat]]] = {}
        self._own_cards = self._cards[rank]
        self._peer_counters = [self._counters[peer] for peer in self.peers]
        self._peer_cards = [
            [self._cards[peer][slot] for peer in self.peers] for slot in range(CARDS)
        ]
        self.compiled: Any = self._compile()
        self.at: _Progress = self.compiled or _Progress()
        # All are past that call which would come before the first one.
        self.at.floor = _FIRST
        self._unchecked: deque[tuple[int, Call]] = deque()

    def _compile(self) -> Any:
        if core is None or not self._patience.polls or self.size > core.MOST_MEMBERS:
            return None
        layout, members = self.layout, range(self.size)
        return core.Board(
            self._memory,
            self.rank,
            self.size,
            [layout.counter(r) for r in members],
            [[layout.card(r, slot) for slot in range(CARDS)] for r in members],
            [[layout.data(r, slot) for slot in range(BLOCKS)] for r in members],
            layout.sleepers,
            layout.block,
            not self._patience.crowded,
        )

    # A call's frame.

    def begin(self, call: Call) -> int:
        """Begin a call: write this member's card, which nobody sees before ``publish``.

        Returns the slot of the call's first block, free of what earlier calls had in it.
        """
        at = self.at
        base = at.base
        if at.floor < base - _TO_THE_ONE_BEFORE or self._unchecked:
            self._settle(call, base - _TO_THE_ONE_BEFORE)
        at.base = base + _CALL
        at.number = number = at.number + 1
        if at.floor < at.busy:
            self._reach_turn(call, at.busy)
        slot = number % BLOCKS
        self._memory[self._own_cards[slot]] = call.packed
        return slot

    def publish(self, step: int) -> None:
        """Show that this member has come to ``step`` of the call."""
        words = self.words
        words[self._mine] = self.at.base + step
        self._take_fence()
        self._drop_fence()
        if self._few:
            if words[self._first_sleepers]:
                self._futex.wake(self._mine)
        elif any(words[word] for word in self._sleeper_words):
            self._futex.wake(self._mine)

    def reach(self, call: Call, peer: int, step: int) -> None:
        """Return when ``peer`` has come to ``step`` of the call."""
        turn = self.at.base + step
        if self.words[self._counters[peer]] < turn:
            self._wait(call, peer, turn)

    def reach_all(self, call: Call, step: int) -> None:
        """Return when all members have come to ``step`` of the call."""
        turn = self.at.base + step
        if self.at.floor < turn:
            words = self.words
            for counter in self._peer_counters:
                if words[counter] < turn:
                    self._reach_turn(call, turn)
                    return
            self.at.floor = turn

    def meet(self, call: Call) -> None:
        """Return when all members have come to the call's first step and have the same card."""
        turn = self.at.base + _FIRST
        slot = self.at.number % CARDS
        packed = call.packed
        words = self.words
        for counter in self._peer_counters:
            if words[counter] < turn:
                self._reach_turn(call, turn)
                break
        else:
            self.at.floor = turn
        memory = self._memory
        for card in self._peer_cards[slot]:
            if memory[card] != packed:
                raise self._mismatch(call, slot)
        if self._unchecked:
            self._compare_earlier(self.at.number)

    def meet_one(self, call: Call, peer: int) -> None:
        """Return when ``peer`` has come to the call's first step and has the same card."""
        self.reach(call, peer, _FIRST)
        slot = self.at.number % CARDS
        if self._memory[self._cards[peer][slot]] != call.packed:
            raise self._mismatch(call, slot, peer)

    def barrier(self, call: Call) -> None:
        """Return when all members have come to the call."""
        self.begin(call)
        self.publish(_FIRST)
        self.meet(call)

    def check_later(self, call: Call) -> None:
        """Have all cards of the call compared when all members meet in the next one, at the latest
        before the next but one begins.
        """
        self._unchecked.append((self.at.number, call))
        self.at.unchecked += 1

    def close(self) -> None:
        """End a call of several blocks: this member reads no other's any more."""
        self.publish(DONE)
        self.at.busy = self.at.base + DONE

    # Notes and blocks.

    def notes(self, rank: int) -> int:
        """Return the number of the word at which ``rank``'s notes about the call begin."""
        return self._notes_at[rank][self.at.number % CARDS]

    def claim(self, call: Call, lap: int) -> None:
        """Return when the block for ``lap`` is free of what earlier calls had in it.

        What this call had in it, ``BLOCKS`` laps ago, is the caller's business.
        """
        if 0 < lap < BLOCKS:
            # Readers of a call of one block are through when they begin the next one. If it had
            # several, ``begin`` has waited for its end.
            ended = self.at.base - (BLOCKS - 1 - lap) * _CALL
            if self.at.floor < ended + _FIRST and self.at.busy < ended - 1:
                self._reach_turn(call, ended + _FIRST)

    def slot(self, lap: int) -> int:
        """Return the slot of the members' blocks for ``lap`` of the call."""
        return (self.at.number + lap) % BLOCKS

    def blocks(self, dtype: np.dtype[np.generic]) -> list[list[Flat]]:
        """Return the blocks as arrays of ``dtype``, by member and slot."""
        found = self._blocks.get(dtype.num)
        if found is None:
            usable = self.layout.block - self.layout.block % dtype.itemsize
            found = self._blocks[dtype.num] = [
                [
                    self.segment.bytes[start : start + usable].view(dtype)
                    for start in (self.layout.data(r, slot) for slot in range(BLOCKS))
                ]
                for r in range(self.size)
            ]
        return found

    def small_parts(self, dtype: np.dtype[np.generic], count: int) -> list[list[Flat]]:
        """Return where ``count`` elements of a call of one block are, by slot and member.

        What fits lies on the line of the card, which the others read anyway; else in the block.
        """
        nbytes = count * dtype.itemsize
        if nbytes > LINE - HEADER_BYTES:
            blocks = self.blocks(dtype)
            return [[of[slot][:count] for of in blocks] for slot in range(BLOCKS)]
        return [
            [
                self.segment.bytes[of[slot].stop : of[slot].stop + nbytes].view(dtype)
                for of in self._cards
            ]
            for slot in range(CARDS)
        ]

    # Waiting.

    def wake_all(self) -> None:
        """Have everybody who sleeps here look again. Any thread."""
        for counter in self._counters:
            self._futex.wake(counter)

    def _wait(self, call: Call, peer: int, turn: int) -> None:
        call.waiting_for = peer
        words, counter = self.words, self._counters[peer]

        def come() -> bool:
            return words[counter] >= turn

        hope = partial(self._check, call, peer)
        try:
            if not self._patience.poll(call, come):
                sleep(call, come, self.segment, counter, self._set_sleeping, hope)
        except PeerLostError:
            # Its last step may have become visible just before the news that it left.
            if words[counter] < turn:
                raise
        call.waiting_for = None

    def _set_sleeping(self, asleep: bool) -> None:
        self.segment.data[self.layout.sleepers + self.rank] = asleep

    def _reach_turn(self, call: Call, turn: int) -> None:
        """Return when all members have come to ``turn``."""
        words = self.words
        missing = [peer for peer in self.peers if words[self._counters[peer]] < turn]
        if len(missing) > 1:
            call.waiting_for = missing[0]
            counters = [self._counters[peer] for peer in missing]

            def come() -> bool:
                # One yield serves for all: the next look may find several of them there.
                while counters and words[counters[-1]] >= turn:
                    counters.pop()
                return not counters

            if self._patience.poll(call, come):
                call.waiting_for = None
                missing = []
        for peer in missing:
            if words[self._counters[peer]] < turn:
                self._wait(call, peer, turn)
        self.at.floor = turn

    def _settle(self, call: Call, begun: int) -> None:
        """See all members in the call before the last one, which begins at the turn ``begun``, and
        compare the cards of that.
        """
        if self.at.floor < begun:
            self._reach_turn(call, begun)
        self._compare_earlier(self.at.number)

    def _compare_earlier(self, limit: int) -> None:
        """Compare the cards of the calls before number ``limit`` that were left for later.

        All members have begun them, and none has begun the fourth call after: the cards are there.
        """
        while self._unchecked and self._unchecked[0][0] < limit:
            number, earlier = self._unchecked.popleft()
            self.at.unchecked -= 1
            slot = number % CARDS
            for card in self._peer_cards[slot]:
                if self._memory[card] != earlier.packed:
                    raise self._mismatch(earlier, slot)

    def _mismatch(self, call: Call, slot: int, peer: int | None = None) -> HeaderMismatchError:
        """Return the error for the card of ``peer`` (None: of the first that differs)."""
        if peer is None:
            cards, memory = self._cards, self._memory
            peer = next(peer for peer in self.peers if memory[cards[peer][slot]] != call.packed)
        received = CallHeader.unpack(self._memory[self._cards[peer][slot]])
        return HeaderMismatchError(
            f"this rank is in {call.header}, {self._membership.describe(peer)} in {received}",
            peer,
            call.header,
            received,
        )
