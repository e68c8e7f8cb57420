"""A message that is arriving in a mailbox, and a receive that waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from transport._calls.call import Call
from transport._calls.header import CallHeader
from transport._operands.reduce_op import Flat
from transport._waiting.interrupts import Condition


@dataclass(slots=True, eq=False)
class IncomingMessage:
    """A message whose bytes are arriving: fill ``buffer``, then ``complete`` or ``fail``.

    ``buffer`` may be the receiver's array, which a receiver that gives up replaces. So a thread
    holds ``guard`` while it reads the attribute and writes to the memory, and never waits then. A
    ``stored`` message has its own memory. The other attributes are the mailbox's, under its lock.
    """

    _lock: threading.RLock  # pyright: ignore[reportInvalidTypeForm]
    _on_change: Callable[[], None]
    src: int
    header: CallHeader
    buffer: memoryview
    guard: threading.Lock = field(default_factory=threading.Lock)
    done: bool = False
    error: Exception | None = None
    serial: int = 0
    stored: bool = False
    receive: PendingReceive | None = None

    def complete(self) -> None:
        """Mark the message as complete, and wake its receiver."""
        with self._lock:
            self.done = True
            receive, self.receive = self.receive, None  # breaks the reference cycle
            if receive is not None:
                receive.notify()
                self._on_change()

    def fail(self, error: Exception) -> None:
        """Mark the message as broken: its receiver raises ``error``."""
        self.error = error
        self.complete()


@dataclass(slots=True, eq=False)
class PendingReceive:
    """A receive that waits for a message."""

    call: Call
    buffer: Flat
    src: int | None
    tag: int
    code: int
    """The ``dtype_code`` of the buffer's dtype."""
    wake: Condition | None = None
    """The condition of the sleeping thread, made when needed. Under the mailbox's lock."""
    incoming: IncomingMessage | None = None
    error: Exception | None = None

    def notify(self) -> None:
        """Wake the receive's thread if it sleeps. Under the mailbox's lock."""
        if self.wake is not None:
            self.wake.notify_all()

    def is_settled(self) -> bool:
        """True if the message has arrived, or the receive has failed."""
        return self.error is not None or (self.incoming is not None and self.incoming.done)

    def mismatch(self, incoming_header: CallHeader, nbytes: int) -> bool:
        """True if a message does not fit this receive's buffer."""
        return (
            incoming_header.dtype != self.code
            or incoming_header.elements != self.buffer.size
            or nbytes != self.buffer.nbytes
        )
