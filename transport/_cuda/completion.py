"""The end of a call on a device.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from transport._calls.header import CallHeader
from transport._cuda.driver import Driver
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import next_slice
from transport._waiting.spinning import PollBackoff

_PAUSES = 20e-6, 1e-3


class Completion:
    """The end of a call on a device: an event on the stream that runs the call.

    Holds references to ``owners`` (the objects that own the memory) until it detects the end or is
    garbage-collected.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        stream: int,
        current: Callable[[], int],
        owners: Iterable[object] = (),
    ) -> None:
        self.stream = stream
        self._driver = driver
        self._lock = threading.Lock()
        self._current: Callable[[], int] | None = current
        self._owners: tuple[object, ...] = tuple(owners)
        self._failure: Exception | None = None
        self._at_fault: CallHeader | None = None
        self.verify: Callable[[], Exception | None] = lambda: None
        """Called when the device is done; returns the call's error, or None."""
        self.settled: Callable[[], bool] = lambda: True
        """The call is done only when this, too, returns True."""
        self._explain: Callable[[Exception, CallHeader | None], Exception] | None = None
        self._event = driver.create_event(device)
        self._event.record(stream)

    def fail(self, error: Exception, at_fault: CallHeader | None = None) -> None:
        """Mark the call as failed. Waits for its end then raise ``error``.

        ``at_fault`` is the header of the call that caused the failure.
        """
        self._failure, self._at_fault = error, at_fault

    def explain_by(self, explain: Callable[[Exception, CallHeader | None], Exception]) -> None:
        """Make waits raise ``explain(error, at_fault)`` instead of the ``error`` of ``fail``."""
        self._explain = explain
        self.report_failure()

    def report_failure(self) -> None:
        """Explain a failure before a thread waits for it, because other members need the report."""
        if self._failure is not None and self._explain is not None:
            self._explain(self._failure, self._at_fault)

    def extend(self, current: Callable[[], int], *owners: object) -> None:
        """Extend the call to the work on ``stream`` so far, and hold ``owners`` until its end.

        ``current`` returns the stream that the calling thread will use next.
        """
        with self._lock:
            self._current = current
            self._owners = (*self._owners, *owners)
            self._event.record(self.stream)

    def join(self) -> None:
        """Make later work on the calling thread's current stream wait for the call."""
        current = self._current
        if current is None:
            self._raise_failure()
        else:
            self.join_stream(current())

    def join_stream(self, stream: int) -> None:
        """Make later work on ``stream`` wait for the call."""
        self._raise_failure()
        if stream != self.stream:
            self._driver.wait_event(stream, self._event)

    def done(self) -> bool:
        """Return whether the device has completed the call. Raises the error if the call failed."""
        self._raise_failure()
        if not self.ended():
            return False
        self._raise_failure(self.verify())
        return True

    def ended(self) -> bool:
        """True if the call is settled and its device work is over, successful or not."""
        return self.over() and self.settled()

    def over(self) -> bool:
        """True if the device work is over, successful or not."""
        with self._lock:
            if not self._event.query():
                return False
            # A Work may live longer: it must not hold this memory, and needs no stream to wait on.
            self._owners, self._current = (), None
            return True

    def wait(self, deadline: Deadline, check: Callable[[], None] | None = None) -> bool:
        """Block the calling host thread until the call is done. Return False if the deadline passes
        first.

        ``check`` is called periodically and may end the wait by raising.
        """
        ended = wait_until(self.ended, deadline, check or self._raise_failure)
        self._raise_failure(self.verify() if ended else None)
        return ended

    def _raise_failure(self, found: Exception | None = None) -> None:
        if self._failure is None:
            self._failure = found
        if self._failure is not None:
            if self._explain is not None:
                # The explanation replaces this thread's error, which stays in __context__.
                raise self._explain(self._failure, self._at_fault) from None
            raise self._failure


def wait_until(
    ready: Callable[[], bool], deadline: Deadline, check: Callable[[], None] | None = None
) -> bool:
    """Block the calling host thread until ``ready()``. Return False if the deadline passes first.

    ``check`` is called periodically and may end the wait by raising.
    """
    pauses = PollBackoff(*_PAUSES)
    while not ready():
        if check is not None:
            check()
        if deadline.expired:
            return False
        # CUDA's own wait has no deadline. Polling at growing intervals needs little CPU.
        time.sleep(next_slice(pauses.next()))
    return True
