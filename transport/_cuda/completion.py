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
from transport._waiting.spinning import Pauses

_PAUSES = 20e-6, 1e-3


class Completion:
    """The end of a call on a device: an event on the stream that carries the call.

    Keeps ``owners`` (the objects that hold the memory) until the end is seen, or until it is
    dropped itself.
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
        """Called when the device is done; returns the error of the call, if any."""
        self.settled: Callable[[], bool] = lambda: True
        """The call counts as done only when this returns True as well."""
        self._explain: Callable[[Exception, CallHeader | None], Exception] | None = None
        self._event = driver.create_event(device)
        self._event.record(stream)

    def fail(self, error: Exception, at_fault: CallHeader | None = None) -> None:
        """Mark the call as failed: waiting for its end raises ``error``.

        ``at_fault`` is the call that failed, if it was another one.
        """
        self._failure, self._at_fault = error, at_fault

    def explain_by(self, explain: Callable[[Exception, CallHeader | None], Exception]) -> None:
        """Raise ``explain(error, at_fault)`` in the place of the ``error`` that ``fail`` gave."""
        self._explain = explain
        self.report_failure()

    def report_failure(self) -> None:
        """Explain a failure now, before a thread asks: other members wait for the report."""
        if self._failure is not None and self._explain is not None:
            self._explain(self._failure, self._at_fault)

    def extend(self, current: Callable[[], int], *owners: object) -> None:
        """Include the later work on ``stream``, and keep ``owners`` until its end.

        ``current`` as at the beginning.
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
        """True if the device has completed the call. Raises DistBackendError if it failed."""
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
            # A Work that is kept for longer must not keep this memory, and has nothing to wait for.
            self._owners, self._current = (), None
            return True

    def wait(self, deadline: Deadline, check: Callable[[], None] | None = None) -> bool:
        """Block the calling host thread until the call is done; False when the deadline passes
        first.

        ``check`` is called now and then; what it raises ends the wait.
        """
        ended = wait_until(self.ended, deadline, check or self._raise_failure)
        self._raise_failure(self.verify() if ended else None)
        return ended

    def _raise_failure(self, found: Exception | None = None) -> None:
        if self._failure is None:
            self._failure = found
        if self._failure is not None:
            if self._explain is not None:
                # The report says more than this thread's own error, which stays in __context__.
                raise self._explain(self._failure, self._at_fault) from None
            raise self._failure


def wait_until(
    ready: Callable[[], bool], deadline: Deadline, check: Callable[[], None] | None = None
) -> bool:
    """Block the calling host thread until ``ready()``; False when the deadline passes first.

    ``check`` is called now and then; what it raises ends the wait.
    """
    pauses = Pauses(*_PAUSES)
    while not ready():
        if check is not None:
            check()
        if deadline.expired:
            return False
        # CUDA's own wait has no deadline. Polling at growing intervals costs no core.
        time.sleep(next_slice(pauses.next()))
    return True
