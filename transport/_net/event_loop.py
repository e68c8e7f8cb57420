"""A selector and the thread that serves it: what a store's server and ranks' endpoints run in."""

from __future__ import annotations

import contextlib
import logging
import selectors
import threading
from collections.abc import Callable

from transport._waiting.polling import Wakeup

_LOGGER = logging.getLogger("meshlib.transport")

# After an error in ``turn`` it is called again; if it fails each time, not all the time.
_PAUSE_SECONDS = 0.1

OnEvent = Callable[[int], None]
"""The ``data`` of a key in the selector: called with the event mask."""


class EventLoop:
    """Serves ``selector`` in a daemon thread called ``name``, from ``start`` until ``stop``.

    A ready key's ``data``, an ``OnEvent``, is called with the events. The loop calls ``turn()``
    before each wait: it does due work and returns the seconds until the next, or None. It calls
    ``end()`` last, to close everything. All three run in the loop's thread and must not block.

    An error in one of them is logged and stops nothing else, because a rank's loop serves all of
    its groups. After a failed callback its object is not served again, so its owner should catch
    expected errors and clean up.
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
        """Begin to serve."""
        self._thread.start()

    def wake(self) -> None:
        """Have ``turn`` called soon. Thread-safe; never blocks."""
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.notify()

    def stop(self) -> None:
        """End the thread, and wait for that unless this is it. Idempotent."""
        if not self.stopping:
            self.stopping = True
            self.wake()
        # Garbage is collected in any thread, also in this one.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _take_turn(self) -> float | None:
        try:
            return self._turn()
        except Exception:
            _LOGGER.exception("%s: what was due failed", self._thread.name)
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
    """Return the smaller number of seconds; None stands for never."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
