"""The thread that receives point-to-point messages from MPI while a receive waits for one."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from transport._calls.header import CallHeader
from transport._communicators.runtime import Membership
from transport._errors import CommunicatorAbortedError, DistError, PeerLostError
from transport._links.mailbox import Mailbox
from transport._mpi.library import MpiProcess, wait
from transport._mpi.link import INLINE_BYTES, PIECE_BYTES, FrameHead
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition
from transport._waiting.spinning import PollBackoff

_PAUSES = 50e-6, 1e-3


class MpiInbox:
    """A thread that moves messages from MPI to a mailbox.

    It receives messages only from members for which a receive waits. All other messages stay in
    MPI, or with their senders, so none accumulate here and none blocks another.
    """

    def __init__(
        self, process: MpiProcess, membership: Membership, mailbox: Mailbox, tag: int
    ) -> None:
        self._process = process
        self._membership = membership
        self._mailbox = mailbox
        self._tag = tag
        self._head = FrameHead()
        self._members = {rank: i for i, rank in enumerate(membership.ranks)}
        self._wanted: Counter[int | None] = Counter()
        self._received: Counter[int] = Counter()
        # For each member that has left: the number of messages that it sent to this rank, and the
        # error to raise once these are received.
        self._leaving: dict[int, tuple[int, PeerLostError]] = {}
        self._changed = Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def wanting(self, src: int | None) -> Generator[None]:
        """Receive messages from member ``src`` (None: from all) while the block runs."""
        with self._changed:
            self._wanted[src] += 1
            if self._thread is None and not self._closed:
                name = f"meshlib-mpi-inbox-{self._membership.group}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._wanted[src] -= 1
                self._wanted += Counter()  # Drops counts of zero.

    def lose(self, src: int, sent: int, error: PeerLostError) -> None:
        """Record that member ``src`` has left, after sending ``sent`` messages to this rank.

        Once all of them are received, the mailbox fails with ``error``.
        """
        with self._changed:
            self._leaving.setdefault(src, (sent, error))
        self._lose_if_all_received(src)

    def _lose_if_all_received(self, src: int) -> None:
        with self._changed:
            sent, error = self._leaving.get(src, (math.inf, None))
            all_received = self._received[src] >= sent
        if error is not None and all_received:
            self._mailbox.fail(src, error)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        pauses = PollBackoff(*_PAUSES)
        while True:
            with self._changed:
                while not self._wanted and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                sources = [None] if None in self._wanted else list(self._wanted)
            try:
                moved = [self._receive_one(src) for src in sources]
            except CommunicatorAbortedError:
                return
            if any(moved):
                pauses.restart()
            else:
                time.sleep(pauses.next())

    def _receive_one(self, src: int | None) -> bool:
        """Move one arrived message from ``src`` to the mailbox; return False if there is none."""
        process, mpi = self._process, self._process.mpi
        source = mpi.ANY_SOURCE if src is None else self._membership.ranks[src]
        status = mpi.Status()
        message = process.comm.Improbe(source, self._tag, status)
        if message is None:
            return False
        sender = self._members[status.Get_source()]
        message.Recv([self._head.memory, mpi.BYTE])
        header = CallHeader.unpack(self._head.header)
        incoming = self._mailbox.begin(sender, header, self._head.size)
        payload = self._head.payload
        if self._head.size > INLINE_BYTES:
            # Not into the receiver's array: MPI would still write there after a timeout.
            payload = (
                incoming.buffer if incoming.stored else np.empty(self._head.size, np.uint8).data
            )
            try:
                self._fill(payload, status.Get_source())
            except DistError as error:
                incoming.fail(PeerLostError(str(error), sender))
                raise
        if payload is not incoming.buffer:
            with incoming.guard:
                incoming.buffer[:] = payload
        incoming.complete()
        with self._changed:
            self._received[sender] += 1
        self._lose_if_all_received(sender)
        return True

    def _fill(self, memory: memoryview, source: int) -> None:
        process = self._process
        pieces = range(0, memory.nbytes, PIECE_BYTES)
        requests: list[Any] = [
            process.comm.Irecv(
                [memory[start : start + PIECE_BYTES], process.mpi.BYTE], source, self._tag
            )
            for start in pieces
        ]
        # The sender has started, so the pieces arrive without a deadline unless it fails.
        wait(requests, Deadline.after(math.inf), self._check_open)

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorAbortedError("the communicator was closed")
