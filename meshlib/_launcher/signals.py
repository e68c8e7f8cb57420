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

    The process that controls this launcher writes signals as bytes to ``control``, a descriptor.
    Its end, also by SIGKILL, counts as SIGHUP.
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
        """Return the received signal numbers (and ``KNOCK``); empty after ``timeout`` seconds."""
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
    """Wait up to ``timeout`` seconds (None: without end) for something to read, or an end; return
    the ``descriptors`` that have it.

    Unlike ``select`` it takes descriptors beyond 1023.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    found = poller.poll(None if timeout is None else max(timeout, 0.0) * 1000)
    return [descriptor for descriptor, _ in found]


def _note(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has it already."""
