"""A selector and its thread, which run a store's server and ranks' endpoints."""

from __future__ import annotations

import contextlib
import logging
import selectors
import threading
from collections.abc import Callable

from transport._waiting.polling import Wakeup

_LOGGER = logging.getLogger("meshlib.transport")

# The pause before ``turn`` is called again after an error.
_PAUSE_SECONDS = 0.1

OnEvent = Callable[[int], None]
"""The ``data`` of a key in the selector: called with the event mask."""


class EventLoop:
    """Serves ``selector`` in a daemon thread called ``name``, from ``start`` until ``stop``.

    The loop calls a ready key's ``data``, an ``OnEvent``, with the events. Before each wait it
    calls ``turn()``, which does pending work and returns the seconds until the next call, or None.
    It calls ``end()`` last, to close everything. All three run in the loop's thread and must not
    block.

    An error in one of them is logged and does not stop the loop, which serves all groups of a
    rank. An object whose callback failed is not served again, so its owner should catch expected
    errors and clean up.
    """

    def __init__(
        self, name: str, turn: Callable[[], float | None], end: Callable[[], None]
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self._turn = turn
        self._end = end
        self.stopping = False
        """True if ``stop`` was called."""
        self._wakeup: Wakeup | None = (wakeup := Wakeup())
        on_wakeup: OnEvent = lambda _events: wakeup.clear()  # noqa: E731
        self.selector.register(wakeup.fd, selectors.EVENT_READ, on_wakeup)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the loop call ``turn`` soon. Thread-safe; never blocks."""
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.notify()

    def stop(self) -> None:
        """Stop the thread and join it, unless it is the calling thread. Idempotent."""
        if not self.stopping:
            self.stopping = True
            self.wake()
        # The garbage collector may call this in any thread, including the loop's.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _take_turn(self) -> float | None:
        try:
            return self._turn()
        except Exception:
            _LOGGER.exception("%s: the loop's work failed", self._thread.name)
            return _PAUSE_SECONDS

    def _run(self) -> None:
        try:
            while not self.stopping:
                for key, events in self.selector.select(self._take_turn()):
                    try:
                        key.data(events)
                    except Exception:
                        _LOGGER.exception("%s: a callback failed", self._thread.name)
                        with contextlib.suppress(KeyError, ValueError):
                            self.selector.unregister(key.fileobj)
        finally:
            self._end()
            self.selector.close()
            self._wakeup = None


def sooner(one: float | None, other: float | None) -> float | None:
    """Return the smaller number of seconds; None means never."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
