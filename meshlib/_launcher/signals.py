"""Converts signals to a launcher into bytes of a pipe, which one loop reads."""

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

    The handlers do no work, so they cannot interrupt a change halfway. One loop handles the exits
    of children, Ctrl-C and the wakeups by threads, and sleeps in between.

    A process that controls this launcher writes signal numbers as bytes to the descriptor
    ``control``. The end of that process, also by SIGKILL, counts as SIGHUP.
    """

    def __init__(self, control: int | None = None) -> None:
        self._control = control
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
                continue  # nohup: the job must outlive the terminal
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
        """Make ``wait`` return. Thread-safe."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the loop anyway
            os.write(self._writer, bytes([KNOCK]))

    def wait(self, timeout: float | None) -> list[int]:
        """Return the received signal numbers and ``KNOCK``, or [] after ``timeout`` seconds."""
        control = () if self._control is None else (self._control,)
        received: list[int] = []
        for descriptor in readable(timeout, self._reader, *control):
            if descriptor == self._control:
                received += self._read_control(descriptor)
                continue
            with contextlib.suppress(BlockingIOError):
                received += os.read(descriptor, 4096)
        return received

    def _read_control(self, descriptor: int) -> list[int]:
        try:
            data = os.read(descriptor, 4096)
        except OSError:
            data = b""
        if not data:
            self._control = None
            return [signal.SIGHUP]
        return [number for number in data if number in WATCHED]


def readable(timeout: float | None, *descriptors: int) -> list[int]:
    """Return the ``descriptors`` with data or an end to read.

    Waits up to ``timeout`` seconds (None: forever). Unlike ``select``, it supports descriptors
    above 1023.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    found = poller.poll(None if timeout is None else max(timeout, 0.0) * 1000)
    return [descriptor for descriptor, _ in found]


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal's number is already in the pipe."""
