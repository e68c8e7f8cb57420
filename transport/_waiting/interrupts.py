"""Deferral of Ctrl-C until the library waits or returns to the program.

Python raises KeyboardInterrupt in the main thread between any two bytecodes, for example just after
the thread has acquired a lock or read another thread's message. No code can stay consistent under
that. So a job installs ``InterruptHandler``. If a SIGINT arrives while the main thread is in the
library, the handler defers it; the program's own frames are interrupted as usual. It costs nothing
until a signal arrives. Compiled code is safe, because Python runs handlers only between bytecodes.

Each wait checks for a deferred interrupt before it begins and every ``SLICE_SECONDS``, through
``next_slice``, ``sliced`` or ``look``. KeyboardInterrupt thus leaves a call in the same places as a
timeout; clean up in ``finally``. Other threads are never interrupted, and wait without slices.

The handler replaces only Python's default handler. A program's own handler stays installed. It may
call the library, but must not raise.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from signal import getsignal
else:
    from _signal import getsignal  # The one in ``signal`` is slow, because it creates enums.

T = TypeVar("T")

SLICE_SECONDS = 0.05
"""The longest time between two checks for an interrupt while the main thread waits."""


class InterruptHandler:
    """A SIGINT handler that defers the signal in frames of ``packages`` (top-level names).

    A second signal that arrives before the first was raised is raised immediately, because the
    library may be busy for a long time without a wait.
    """

    __slots__ = ("_packages", "_pending")

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self._pending = False

    def install(self) -> None:
        """Replace Python's default handler, if it is installed. Does nothing in other threads."""
        if _in_main() and getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)

    def restore(self) -> None:
        """Reinstall Python's default handler, unless the program has installed another since."""
        if _in_main() and getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a SIGINT that arrived in ``frame``."""
        outermost = self._outermost(frame)
        if outermost is None or self._pending:
            self._raise()
        self._pending = True
        if sys.getprofile() is None:  # Under a profiler, only waits raise.
            sys.setprofile(partial(self._on_return, outermost))

    def raise_deferred(self) -> None:
        """Raise KeyboardInterrupt if a signal was deferred. Main thread only."""
        if self._pending:
            self._raise()

    def _outermost(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame in which the program entered the library, or None if it has not."""
        found = None
        while frame is not None and frame.f_code is not run_outside.__code__:
            name = str(frame.f_globals.get("__name__"))
            if name == "__main__":
                break
            if name.partition(".")[0] in self._packages:
                found = frame
            frame = frame.f_back
        return found

    def _on_return(self, outermost: FrameType, frame: FrameType, event: str, _: Any) -> None:
        if frame is outermost and event == "return":
            self._raise()

    def _raise(self) -> NoReturn:
        self._pending = False
        profile = sys.getprofile()
        if isinstance(profile, partial) and profile.func == self._on_return:
            sys.setprofile(None)
        raise KeyboardInterrupt


def run_outside(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return ``function(*args, **kwargs)``, a call of the program that Ctrl-C may interrupt."""
    return function(*args, **kwargs)


def look() -> None:
    """Raise KeyboardInterrupt if one was deferred and this is the main thread."""
    if _in_main():
        handler = getsignal(signal.SIGINT)
        if isinstance(handler, InterruptHandler):
            handler.raise_deferred()


def next_slice(seconds: float = math.inf) -> float:
    """Call ``look``; return the seconds to wait before the next check, at most ``seconds``."""
    if _in_main():
        look()
        return min(seconds, SLICE_SECONDS)
    return min(seconds, threading.TIMEOUT_MAX)


def sliced(wait: Callable[[float], object], seconds: float | None = None) -> bool:
    """Return whether ``wait(seconds)`` succeeds. In the main thread, wait in slices.

    Without ``seconds``, wait until it succeeds.
    """
    until = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = max(0.0, until - time.monotonic())
        if wait(next_slice(left)):
            return True
        if left <= 0:
            return False


def join(thread: threading.Thread) -> None:
    """Wait for the end of ``thread``, interruptibly."""

    def ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    sliced(ended)


class Condition(threading.Condition):
    """A condition variable whose waits Ctrl-C can end, with the lock held as usual."""

    _notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification; return False if ``timeout`` seconds pass first."""

        def woken(seconds: float) -> bool:
            # A notification may arrive after a slice has ended, but before it reacquires the lock.
            before = self._notified
            return threading.Condition.wait(self, seconds) or self._notified != before

        return sliced(woken, timeout)

    def notify(self, n: int = 1) -> None:
        """Wake ``n`` waiting threads. The caller holds the lock. ``notify_all`` calls this, too."""
        self._notified += 1
        super().notify(n)


def is_held(lock: threading.RLock) -> bool:  # pyright: ignore[reportInvalidTypeForm]
    """Return whether the calling thread holds ``lock``, as a signal handler may find it."""
    return lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]


def _in_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
