"""A message that is on its way to a mailbox, and a receive that waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from transport.call import Call, CallHeader, dtype_code
from transport.condition import Condition
from transport.operands.reduce_op import Flat


class Incoming:
    """A message whose bytes are on their way: fill ``buffer``, then ``complete`` or ``fail``.

    ``buffer`` may be the receiver's array, and a receiver that gives up takes it back: so it is
    looked up and written under the ``guard``, which is held for moments, not while anybody is
    waited for. What is ``stored`` has memory of its own. The other attributes are the mailbox's,
    under its lock.
    """

    __slots__ = (
        "_lock",
        "_stir",
        "buffer",
        "done",
        "error",
        "guard",
        "header",
        "receive",
        "serial",
        "src",
        "stored",
    )

    def __init__(
        self,
        lock: threading.RLock,  # pyright: ignore[reportInvalidTypeForm]
        stir: Callable[[], None],
        src: int,
        header: CallHeader,
        buffer: memoryview,
    ) -> None:
        self._lock = lock
        self._stir = stir
        self.src = src
        self.header = header
        self.buffer = buffer
        self.guard = threading.Lock()
        self.done = False
        self.error: Exception | None = None
        self.serial = 0
        self.stored = False
        self.receive: Receive | None = None

    def complete(self) -> None:
        """Say that ``buffer`` holds the message."""
        with self._lock:
            self.done = True
            receive, self.receive = self.receive, None  # each refers to the other
            if receive is not None:
                receive.notify()
                self._stir()

    def fail(self, error: Exception) -> None:
        """Say that the message will never be whole; its receiver raises ``error``."""
        self.error = error
        self.complete()


class Receive:
    """A receive that waits for a message to be announced."""

    __slots__ = ("buffer", "call", "code", "error", "incoming", "src", "tag", "wake")

    def __init__(self, call: Call, buffer: Flat, src: int | None, tag: int) -> None:
        self.call = call
        self.buffer = buffer
        self.code = dtype_code(buffer.dtype)
        self.src = src
        self.tag = tag
        self.wake: Condition | None = None
        """What its thread sleeps on; made when it comes to that. Under the mailbox's lock."""
        self.incoming: Incoming | None = None
        self.error: Exception | None = None

    def notify(self) -> None:
        """Wake its thread, if that sleeps. Under the mailbox's lock."""
        if self.wake is not None:
            self.wake.notify_all()

    def is_settled(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.error is not None or (self.incoming is not None and self.incoming.done)

    def mismatch(self, incoming_header: CallHeader, nbytes: int) -> bool:
        """Whether a message is not what this receive has room for."""
        return (
            incoming_header.dtype != self.code
            or incoming_header.elements != self.buffer.size
            or nbytes != self.buffer.nbytes
        )
