"""Calls on a device that are under way: a thread sees that they end in time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from transport.call import Call
from transport.cuda.flat import Completion
from transport.errors import CommunicatorTimeoutError, DistBackendError, DistError

_SECONDS = 0.02
_IDLE_SECONDS = 5.0


class Watch:
    """Looks after the calls of one communicator that a device carries out.

    A call that is not done at its deadline, or about which ``check()`` returns a trouble, ends the
    watch: ``on_trouble(error)`` is called once, in the watch's thread, and every call under way
    raises the error for whoever asks for its end. The thread lives while there are calls.
    """

    def __init__(
        self, name: str, check: Callable[[], str | None], on_trouble: Callable[[DistError], None]
    ) -> None:
        self._name = name
        self._check = check
        self._on_trouble = on_trouble
        self._changed = threading.Condition()
        self._calls: deque[tuple[Call, Completion]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.trouble: DistError | None = None

    def add(self, call: Call, completion: Completion) -> None:
        """Look after ``call`` until ``completion``."""
        with self._changed:
            if self.trouble is not None:
                completion.fail(self.trouble)
                return
            completion.verify_by(self._verify)
            self._calls.append((call, completion))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            else:
                self._changed.notify_all()

    def fail(self, error: DistError) -> None:
        """Make all calls under way raise ``error``, without ``on_trouble``. Idempotent."""
        with self._changed:
            if self.trouble is None:
                self.trouble = error
            for _, completion in self._calls:
                completion.fail(self.trouble)
            self._calls.clear()
            self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is under way; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._calls, seconds)

    def close(self) -> None:
        """End the thread, and wait for that."""
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
            error = self._look()
            if error is not None:
                self.fail(error)
                with suppress(DistError):  # the trouble itself is what everybody gets to see
                    self._on_trouble(error)
            with self._changed:
                if self._calls and not self._closed:
                    self._changed.wait(_SECONDS)

    def _verify(self) -> DistError | None:
        # Work that was given up ends like work that was done: only the library knows.
        if self.trouble is not None:
            return self.trouble
        trouble = self._check()
        return None if trouble is None else DistBackendError(trouble)

    def _look(self) -> DistError | None:
        try:
            with self._changed:
                calls = list(self._calls)
            done = 0
            for call, completion in calls:
                if completion.done():
                    done += 1
                    continue
                if call.deadline.expired:
                    return CommunicatorTimeoutError(
                        f"{call.header}: the device has not done it after"
                        f" {call.deadline.seconds:g} s: a member has not made the call, or work"
                        " before it on the array's stream has not ended",
                        None,
                    )
                break  # they end in order
            with self._changed:
                for _ in range(min(done, len(self._calls))):
                    self._calls.popleft()
                self._changed.notify_all()
            return self._verify()
        except DistError as error:
            return error
