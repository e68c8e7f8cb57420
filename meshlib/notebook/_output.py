"""The ranks' output, which the calling cell shows, and the events of calls.

meshrun writes whole lines, prefixed by the rank. At the end of a task the rank writes a mark to
both streams: the output before the mark belongs to that task.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from transport._waiting.interrupts import Condition

_MARK = "\x1e"
_MOST_LINES = 10_000
"""The most lines to buffer; then ranks that print block, as with a full pipe."""
_LINE = re.compile(rf"\[rank (\d+)\] (.*?)(?:{_MARK}(\d+))?\n?", re.DOTALL)
_CLOSE_SECONDS = 2.0


def mark(number: int) -> None:
    """Write the mark of the end of task ``number`` to standard output and error."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        with suppress(OSError, ValueError, AttributeError):  # the program has closed it
            stream.flush()
        with suppress(OSError):
            os.write(descriptor, f"{_MARK}{number}\n".encode())


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of a rank or of the launcher, on standard output (1) or error (2)."""

    stream: int
    text: str
    of_launcher: bool


@dataclass(frozen=True, slots=True)
class Marked:
    """All that ``rank`` printed on ``stream`` up to the end of task ``number`` has arrived."""

    stream: int
    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The call of a rank has ended."""

    rank: int


class LauncherEnded:
    """The launcher has ended, and all of its output has arrived."""


Event = Printed | Marked | Answered | LauncherEnded


class EventQueue:
    """A queue of events for the thread that calls ranks."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._lines: deque[Event] = deque()
        self._answers: deque[Event] = deque()
        self._closed = False

    def put_output(self, event: Event) -> None:
        """Add ``event``, found in an output; wait while the buffer is full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) < _MOST_LINES or self._closed)
            self._lines.append(event)
            self._changed.notify_all()

    def put(self, event: Event) -> None:
        """Add ``event``, which is not from an output."""
        with self._changed:
            self._answers.append(event)
            self._changed.notify_all()

    def next(self, until: float) -> Event | None:
        """Return the next event, or None at the time ``until``. Ctrl-C ends the wait."""
        with self._changed:
            seconds = max(0.0, until - time.monotonic())
            self._changed.wait_for(lambda: self._lines or self._answers, seconds)
            queue = self._lines or self._answers
            if not queue:
                return None
            self._changed.notify_all()
            return queue.popleft()

    def close(self) -> None:
        """Discard the buffered output, and no longer block on new output."""
        with self._changed:
            self._closed = True
            self._lines.clear()
            self._changed.notify_all()


class OutputReader:
    """Threads that read both outputs of the launcher ``process`` into ``events``."""

    def __init__(self, process: subprocess.Popen[bytes], events: EventQueue) -> None:
        self._events = events
        self._left = 2
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._read, args=(stream, pipe), name=f"meshlib-output-{stream}", daemon=True
            )
            for stream, pipe in ((1, process.stdout), (2, process.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait up to two seconds for each output to end."""
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _read(self, stream: int, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                for event in _events(stream, line.decode(errors="replace")):
                    self._events.put_output(event)
        with self._lock:
            self._left -= 1
            if not self._left:
                self._events.put_output(LauncherEnded())


def _events(stream: int, line: str) -> list[Event]:
    found = _LINE.fullmatch(line)
    if found is None or found[3] is None:
        return [Printed(stream, line, of_launcher=found is None)]
    begun = [Printed(stream, f"[rank {found[1]}] {found[2]}\n", False)] if found[2] else []
    return [*begun, Marked(stream, int(found[1]), int(found[3]))]


def show(printed: Printed) -> None:
    """Print the line in the output of the calling cell."""
    (sys.stdout if printed.stream == 1 else sys.stderr).write(printed.text)
