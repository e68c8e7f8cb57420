"""Signals to a launcher, as bytes of a pipe that one loop reads."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType, TracebackType

KNOCK = 0
"""The result of ``wait`` after a call of ``knock``."""

WATCHED = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGURG,
)


class SignalPipe:
    """Turns signals into bytes of a pipe while its ``with`` block runs. Main thread only.

    No handler does any work, so none can interrupt a half-made change. One loop, which sleeps in
    between, handles the ends of children, Ctrl-C and the news of threads.
    """

    def __init__(self) -> None:
        self._reader, self._writer = -1, -1
        self._old_wakeup = -1
        self._old_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> SignalPipe:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in WATCHED:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the job is meant to outlive the terminal
            self._old_handlers[number] = signal.signal(number, _note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def knock(self) -> None:
        """Make ``wait`` return; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._writer, bytes([KNOCK]))

    def wait(self, timeout: float | None) -> list[int]:
        """Return the signal numbers (and ``KNOCK``) that came; empty after ``timeout`` seconds."""
        readable(self._reader, timeout)
        try:
            return list(os.read(self._reader, 4096))
        except BlockingIOError:
            return []


def readable(descriptor: int, timeout: float | None) -> bool:
    """Wait up to ``timeout`` seconds (None: without end) for something to read, or an end.

    Unlike ``select`` it takes descriptors beyond 1023.
    """
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if timeout is None else max(timeout, 0.0) * 1000))


def _note(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has it already."""
