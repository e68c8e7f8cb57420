"""Ctrl-C is raised where the library waits, and where it returns to the program; nowhere else.

Python raises KeyboardInterrupt in the main thread between any two bytecodes: behind the one that
took a lock, or that read another thread's message. No code stays whole under that. So a job
installs ``InterruptHandler``: it notes a SIGINT that finds the main thread in a frame of the
library, and lets the program's own frames be interrupted as ever. It costs nothing until a signal
comes. Compiled code needs no guard: Python runs handlers only between bytecodes.

Each wait looks for a noted interrupt before it begins and every ``SLICE_SECONDS``: ``next_slice``,
``sliced`` or ``look``. So KeyboardInterrupt leaves these calls as a timeout does, and cleaning up
belongs into ``finally``. Other threads are never interrupted, and wait in one piece.

The handler takes the place of Python's own only. A program that has a handler of its own keeps it:
that may call the library (it runs, or raises at once), but must not raise.
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
    from _signal import getsignal  # signal's own makes enums, which takes longer than all else here

T = TypeVar("T")

SLICE_SECONDS = 0.05
"""The main thread looks for an interrupt at least this often while it waits."""


class InterruptHandler:
    """The handler of SIGINT that defers it in frames of ``packages``, by their top-level names.

    A second signal that comes before the first was raised is raised at once: the library may be
    busy for long without a wait.
    """

    __slots__ = ("_packages", "_pending")

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self._pending = False

    def install(self) -> None:
        """Take the place of Python's own handler, if that is in place. Main thread only."""
        if _in_main() and getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)

    def restore(self) -> None:
        """Put Python's own handler back, unless the program has set another one since."""
        if _in_main() and getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT, which came in ``frame``."""
        outermost = self._outermost(frame)
        if outermost is None or self._pending:
            self._raise()
        self._pending = True
        if sys.getprofile() is None:  # a profiler's calls are interrupted at the next wait
            sys.setprofile(partial(self._on_return, outermost))

    def raise_noted(self) -> None:
        """Raise KeyboardInterrupt if a signal was noted. Main thread only."""
        if self._pending:
            self._raise()

    def _outermost(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame by which the program has entered the library, None if it has not."""
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
    """Return ``function(*args, **kwargs)``: the program, which Ctrl-C interrupts anywhere."""
    return function(*args, **kwargs)


def look() -> None:
    """Raise KeyboardInterrupt if one was noted and this is the main thread."""
    if _in_main():
        handler = getsignal(signal.SIGINT)
        if isinstance(handler, InterruptHandler):
            handler.raise_noted()


def next_slice(seconds: float = math.inf) -> float:
    """Return the seconds, at most ``seconds``, to wait before the next check; ``look`` first."""
    if _in_main():
        look()
        return min(seconds, SLICE_SECONDS)
    return min(seconds, threading.TIMEOUT_MAX)


def sliced(wait: Callable[[float], object], seconds: float | None = None) -> bool:
    """Return whether ``wait(seconds)`` succeeds; in the main thread, it waits in slices.

    Without ``seconds`` it waits until it succeeds.
    """
    until = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = max(0.0, until - time.monotonic())
        if wait(next_slice(left)):
            return True
        if left <= 0:
            return False


def join(thread: threading.Thread) -> None:
    """Wait for the end of ``thread``."""

    def ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    sliced(ended)


class Condition(threading.Condition):
    """A condition variable whose waits Ctrl-C ends, with the lock held as ever."""

    _notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification; return False if ``timeout`` seconds pass first."""

        def woken(seconds: float) -> bool:
            # A notification may come between a slice's end and the lock: no later slice sees it.
            before = self._notified
            return threading.Condition.wait(self, seconds) or self._notified != before

        return sliced(woken, timeout)

    def notify(self, n: int = 1) -> None:
        """Wake ``n`` waiting threads; ``notify_all`` calls this, too. The lock is held."""
        self._notified += 1
        super().notify(n)


def is_held(lock: threading.RLock) -> bool:  # pyright: ignore[reportInvalidTypeForm]
    """True if the calling thread has ``lock``: a signal handler may run in the middle of it."""
    return lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]


def _in_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
