"""A thread that checks the deadlines and errors of calls that run on a device.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from transport._calls.call import Call
from transport._calls.header import CallHeader
from transport._cuda.completion import Completion
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
)
from transport._waiting.interrupts import Condition

_SECONDS = 0.02
_IDLE_SECONDS = 5.0


class DeviceWatchdog:
    """Checks the calls of one communicator that run on a device.

    When a call passes its deadline or ``check()`` returns an error text, the watchdog fails all
    running calls, so that waits for them raise the error. It then calls ``on_error(error)`` once in
    its own thread. The thread exists only while calls are running.
    """

    def __init__(
        self, name: str, check: Callable[[], str | None], on_error: Callable[[DistError], None]
    ) -> None:
        self._name = name
        self._check = check
        self._on_error = on_error
        self._changed = Condition()
        self._calls: deque[tuple[Call, Completion]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: DistError | None = None
        self._at_fault: CallHeader | None = None

    def add(self, call: Call, completion: Completion) -> None:
        """Check ``call`` until ``completion`` ends."""
        with self._changed:
            if self.error is not None:
                completion.fail(self.error, self._at_fault)
                return
            completion.verify = self._verify
            self._calls.append((call, completion))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            else:
                self._changed.notify_all()

    def check_for(self, call: Call) -> None:
        """Raise the error, if any. If another call failed, raise it as CommunicatorAbortedError."""
        if self.error is not None:
            if self._at_fault is None or self._at_fault == call.header:
                raise self.error
            raise CommunicatorAbortedError(str(self.error))

    def fail(self, error: DistError, at_fault: CallHeader | None = None) -> list[Completion]:
        """Make all running calls raise ``error``, without calling ``on_error``. Idempotent.

        ``at_fault`` is the header of the call that failed, if known. Returns the completions of the
        running calls.
        """
        with self._changed:
            if self.error is None:
                self.error, self._at_fault = error, at_fault
            failed = [completion for _, completion in self._calls]
            for completion in failed:
                completion.fail(self.error, self._at_fault)
            self._calls.clear()
            self._changed.notify_all()
            return failed

    def drain(self, seconds: float) -> bool:
        """Wait until no call is running; return False after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._calls, seconds)

    def close(self) -> None:
        """End the thread, and wait for its end."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_IDLE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed, _IDLE_SECONDS)
                if self._closed or not self._calls:
                    self._thread = None
                    return
            found = self._check_calls()
            if found is not None:
                failed = self.fail(*found)
                with suppress(DistError):  # Every call raises the first error.
                    self._on_error(found[0])
                report_first_failure(failed)
            with self._changed:
                if self._calls and not self._closed:
                    self._changed.wait(_SECONDS)

    def _verify(self) -> DistError | None:
        # On the device, aborted work ends like completed work; only ``check`` can tell them apart.
        if self.error is not None:
            return self.error
        found = self._check()
        return None if found is None else DistBackendError(found)

    def _check_calls(self) -> tuple[DistError, CallHeader | None] | None:
        """Return the first error and the header of its call, or None."""
        header: CallHeader | None = None
        try:
            with self._changed:
                calls = list(self._calls)
            done = 0
            for call, completion in calls:
                header = call.header
                if completion.ended():
                    done += 1
                    continue
                if call.deadline.expired:
                    return CommunicatorTimeoutError(
                        f"{call.header}: the device has not completed the call after"
                        f" {call.deadline.seconds:g} s: a member has not made the call, or earlier"
                        " work on the array's stream has not ended",
                        None,
                    ), header
                break  # Calls end in order.
            found = self._verify()
            if found is not None:
                return found, header
            with self._changed:
                for _ in range(min(done, len(self._calls))):
                    self._calls.popleft()
                self._changed.notify_all()
            return None
        except DistError as error:
            return error, header


def report_first_failure(completions: Iterable[Completion]) -> None:
    """Explain the failure of the first call, which makes the group fail on all members."""
    first = next(iter(completions), None)
    if first is not None:
        first.report_failure()
