"""meshlib's Works as Works of ``torch.distributed``, for use from C++."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

from meshlib._calls.call_stream import CallStream
from meshlib._calls.future import at_once
from meshlib._calls.work import Work
from meshlib._groups.process_group import ProcessGroup

_c10d: Any = import_module("torch.distributed")
_futures: Any = import_module("torch.futures")

NO_TIMEOUT = timedelta(0)
_JOIN_SECONDS = 1.0


class ContinuationThreads:
    """Threads that run continuations of calls, in the calls' order, outside any group's stream.

    Continuations of a call that was made in a continuation run in another thread, so a continuation
    may wait for the calls that it makes.
    """

    def __init__(self) -> None:
        self._streams: list[CallStream] = []
        self._lock = threading.Lock()
        self._here = threading.local()

    def level(self) -> int:
        """Return the calling thread's nesting depth of continuations; 0: the program's thread."""
        return getattr(self._here, "level", 0)

    def submit(self, level: int, task: Callable[[], None]) -> None:
        """Run ``task`` after all earlier continuations of calls made at ``level``."""
        with self._lock:
            while len(self._streams) <= level:
                self._streams.append(CallStream(f"meshlib-torch-then-{len(self._streams)}"))
            stream = self._streams[level]

        def run() -> None:
            self._here.level = level + 1
            task()

        stream.submit(run)

    def close(self) -> None:
        """Let the threads end when idle, and wait up to a second for each."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.join(_JOIN_SECONDS)


class TorchWork(_c10d.Work):
    """A call of ``group`` as a Work of PyTorch, whose result is ``tensors``.

    ``work`` is None if the call has ended. ``timeout`` is the call's own deadline, if it has one;
    ``receives`` is true for a receive.
    """

    def __init__(
        self,
        work: Work[Any] | None,
        tensors: Sequence[Any],
        continuations: ContinuationThreads,
        group: ProcessGroup,
        *,
        timeout: timedelta | None = None,
        receives: bool = False,
    ) -> None:
        super().__init__()
        self._work = work
        self._tensors = list(tensors)
        self._continuations = continuations
        self._level = continuations.level()
        self._group = group
        self._timeout = timeout
        self._receives = receives
        self._future: Any = None
        self._lock = threading.Lock()

    @property
    def timeout(self) -> timedelta:
        """The deadline of the call."""
        return self._group.timeout if self._timeout is None else self._timeout

    def is_completed(self) -> bool:
        """True if the call has ended, successfully or not."""
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        """True if the call has ended successfully."""
        return self._work is None or self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the exception of the call, or None."""
        return None if self._work is None else self._work.exception()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the call has ended; return True or raise its exception.

        ``timeout`` bounds this wait, not the call. Zero (``kNoTimeout``) means no bound.
        """
        if self._work is not None:
            self._work.wait(timeout if timeout > NO_TIMEOUT else None)
        return True

    def synchronize(self) -> None:
        """Make the result usable by the caller: an alias of ``wait()``."""
        self.wait()

    def block_current_stream(self) -> None:
        """Order the caller's stream after the call: on the CPU, wait for it."""
        self.wait()

    def result(self) -> list[Any]:
        """Wait for the call and return the tensors that it writes."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Wait for a message and return the group rank of its sender.

        Raises ValueError for a call that is not a receive.
        """
        if self._work is None or not self._receives:
            raise ValueError("source_rank(): only a receive has a source")
        return self._group.group_rank(self._work.source_rank())

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the tensors.

        Its continuations run in the order in which the calls ended. After a failed call it holds a
        RuntimeError with the error's text, the only type that C++ supports.
        """
        with self._lock:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def get_future_result(self) -> Any:
        """Return a future of the call's outcome: c10d's ``WorkResult`` as a number."""
        ended = _futures.Future()
        self._when_ended(lambda: ended.set_result(self._how_it_ended()))
        return ended

    def _how_it_ended(self) -> int:
        return 0 if self._work is None else int(self._work.get_future_result().wait())

    def _make_future(self) -> Any:
        begun = _futures.Future()

        # C++ sees an exception that ``then`` raises, but not the one of ``set_exception``.
        def end(_: Any) -> list[Any]:
            error = self.exception()
            if error is not None:
                raise error
            return self._tensors

        ended = begun.then(end)
        self._when_ended(lambda: begun.set_result(None))
        return ended

    def _when_ended(self, task: Callable[[], None]) -> None:
        """Run ``task`` as a continuation when the call has ended, or now if it has."""
        if self._work is None or self._work.is_completed():
            task()
        else:
            level = self._level
            at_once(self._work.get_future(), lambda _: self._continuations.submit(level, task))
