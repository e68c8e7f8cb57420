"""``Window``: one-sided access to the arrays of other members."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from meshlib._calls.spec import CallSpec
from meshlib._collectives.group_of_ranks import GroupOfRanks, call_queue_of, resolve_rank
from meshlib._collectives.windows.layout import WindowLayout, signals_of
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._checks import to_whole_number
from transport._communicators.base import Communicator
from transport._errors import CommunicatorTimeoutError, PeerLostError
from transport._operands.reduce_op import Flat, ReduceOp
from transport._waiting.deadline import Timeout
from transport._waiting.interrupts import look
from transport._windows.locks import SUM, WORD_CODE, acquire, release, word
from transport._windows.memory import REPLACE, REPLACE_IF, MappedMemory, Target
from transport._windows.service import WindowService

T = TypeVar("T")


class Window:
    """One array per member of a group, which all members can read and change directly.

    Created by ``group.window(array)``. The owner of an array makes no call for another member's
    access. Common arguments:

    - ``dst``, a global rank, or ``group_dst``, a rank in the group: the owner of the array, maybe
      the caller itself;
    - ``offset``: the first element, as an index into the array in C order;
    - ``timeout``: the deadline for waiting; by default the group's.

    ``put``, ``accumulate`` and ``signal`` return when the values may be changed; ``flush`` waits
    for their effect. All other methods return when they are done. ``docs/program/windows.md``
    explains the order in which other members see the effects. Any thread may call the methods.

    Raises TypeError for a dtype other than the window's, ValueError for elements outside the array,
    a rank outside the group, or a closed window. After a ``CollectiveTimeoutError`` the window is
    still usable. ``RankFailedError`` names a member that died or left.
    """

    def __init__(
        self,
        group: GroupOfRanks,
        number: int,
        array: npt.NDArray[Any],
        layout: WindowLayout,
        targets: list[Target],
    ) -> None:
        # Called by ``OneSided.window`` only.
        queue = call_queue_of(group)
        self.array: npt.NDArray[Any] = array
        """This member's array, in the window's memory."""
        self._group = group
        self._queue = queue
        self._layout = layout
        self._number = number
        self._targets = targets
        self._signals_seen = [0] * len(queue.ranks)
        self._unflushed: set[int] = set()
        self._closed = False

    # ------------------------------------------------------------------ data

    def put(
        self,
        values: Any,
        dst: int | None = None,
        offset: int = 0,
        *,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        """Copy ``values``, an array or numbers, to ``dst``'s array."""
        place = self._place(dst, group_dst)
        flat = self._layout.flat(values, "values")
        at = self._layout.at(offset, flat.size, place)
        self._post(Kind.PUT, place, lambda to, call: to.put(call, at, _bytes(flat)), timeout)

    def get(
        self,
        dst: int | None = None,
        offset: int = 0,
        count: int | None = None,
        *,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> npt.NDArray[Any]:
        """Return a copy of ``count`` elements of ``dst``'s array, by default all from ``offset``
        on, with one dim.
        """
        place = self._place(dst, group_dst)
        begin = to_whole_number(offset, "offset")
        wanted = (
            self._layout.counts[place] - begin if count is None else to_whole_number(count, "count")
        )
        at, nbytes = self._layout.at(begin, wanted, place), wanted * self.array.itemsize
        raw = self._do(Kind.GET, place, lambda to, call: to.get(call, at, nbytes), timeout)
        return np.frombuffer(raw, np.uint8).copy().view(self.array.dtype)

    def accumulate(
        self,
        values: Any,
        dst: int | None = None,
        offset: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        *,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        """Combine ``dst``'s array with ``values`` by ``op``, atomically for each element.

        ``op`` is SUM, PRODUCT, MIN, MAX, for integers also BAND, BOR, BXOR. The dtype is an integer
        of 1 to 8 bytes, float32 or float64; others raise TypeError.
        """
        place = self._place(dst, group_dst)
        code, how = self._layout.code(), self._layout.op(op)
        flat = self._layout.flat(values, "values")
        at, data = self._layout.at(offset, flat.size, place), _bytes(flat).data
        self._post(
            Kind.UPDATE, place, lambda to, call: to.combine(call, at, code, how, data), timeout
        )

    def fetch_and_op(
        self,
        value: Any,
        dst: int | None = None,
        offset: int = 0,
        op: ReduceOp | None = ReduceOp.SUM,
        *,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Combine an element of ``dst``'s array with ``value`` by ``op``, atomically.

        Returns the old value, a NumPy scalar. If ``op`` is None, ``value`` replaces the element.
        Supports the dtypes and ops of ``accumulate``.
        """
        how = REPLACE if op is None else self._layout.op(op)
        return self._fetch(value, None, dst, group_dst, offset, how, timeout)

    def compare_and_swap(
        self,
        expected: Any,
        value: Any,
        dst: int | None = None,
        offset: int = 0,
        *,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Replace an element of ``dst``'s array with ``value`` if it is ``expected``, atomically.

        Returns the old value, a NumPy scalar. Supports the dtypes of ``accumulate``.
        """
        return self._fetch(value, expected, dst, group_dst, offset, REPLACE_IF, timeout)

    # ------------------------------------------------------------------ order

    def signal(
        self,
        dst: int | None = None,
        *,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        """Signal ``dst``: one of its calls of ``wait_signal`` for this rank returns.

        ``dst`` then sees everything that this rank put into its array before the signal.
        """
        place = self._place(dst, group_dst)
        at, one = signals_of(self._queue.rank), word(1)
        self._post(
            Kind.UPDATE,
            place,
            lambda to, call: to.combine(call, at, WORD_CODE, SUM, one, True),
            timeout,
        )

    def wait_signal(
        self,
        src: int | None = None,
        *,
        group_src: int | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        """Wait for a signal from ``src``, a global rank, or ``group_src``, a rank in the group.

        Each signal ends one wait. Signals are counted separately for each sender.
        """
        self._check_open()
        place = resolve_rank(self._group, src, group_src, "src")
        at, own = signals_of(place), self._own

        def run(communicator: Communicator, call: Call) -> None:
            seen = self._signals_seen[place]
            while own.await_word(at, seen) == seen:
                try:
                    self._check_wait(communicator, call, place, "has sent no signal")
                except PeerLostError:  # its last signals may still arrive
                    if own.await_word(at, seen) == seen:
                        raise
            self._signals_seen[place] = seen + 1

        self._wait(Kind.WAIT_SIGNAL, place, run, timeout)

    def flush(
        self,
        dst: int | None = None,
        *,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        """Wait until this rank's operations on ``dst``'s array, by default on all arrays, are done.

        All ranks then see their effects.
        """
        every = dst is None and group_dst is None
        if every:
            self._check_open()
        places = range(len(self._targets)) if every else [self._place(dst, group_dst)]
        for place in places:
            target = self._targets[place]
            if target.direct:
                target.flush(None)
            elif place in self._unflushed:
                self._unflushed.discard(place)
                self._do(Kind.FLUSH, place, lambda to, call: to.flush(call), timeout)

    def fence(self, timeout: Timeout | None = None) -> None:
        """Wait until every member has called ``fence`` and all earlier operations are done."""
        self.flush(timeout=timeout)
        self._queue.issue(CallSpec(Kind.BARRIER, _meet), timeout=timeout)

    @contextmanager
    def lock(
        self,
        dst: int | None = None,
        *,
        shared: bool = False,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> Generator[None]:
        """Return a context manager that holds the lock of ``dst``'s array.

        The lock is exclusive, or, if ``shared``, held together with other shared holders. It is
        advisory. At the end of the block its operations on that array are done. The lock is not
        reentrant: a second ``lock`` in the same thread times out.
        """
        place = self._place(dst, group_dst)
        target, owner = self._targets[place], self._queue.ranks[place]

        def run(communicator: Communicator, call: Call) -> int:
            def check(holder: int | None, sharing: int) -> None:
                if holder is None:
                    what = f"did not get its lock back from {sharing} ranks that share it"
                    self._check_wait(communicator, call, place, what)
                else:
                    what = f"did not release the lock of rank {owner}"
                    self._check_wait(communicator, call, holder, what)

            return acquire(target, self._queue.rank, shared, call, check)

        back = self._wait(Kind.LOCK, place, run, timeout)
        try:
            yield
            self.flush(group_dst=place, timeout=timeout)
        finally:
            if self._queue.state.usable and not self._closed:
                self._post(Kind.LOCK, place, lambda to, call: release(to, call, back), timeout)

    # ------------------------------------------------------------------ closing

    def close(self, timeout: Timeout | None = None) -> None:
        """Close the window after a ``fence``; every member calls. Idempotent.

        ``array`` keeps its contents. On a broken group the window closes without waiting.
        """
        if self._closed:
            return
        try:
            if self._queue.state.usable:
                self.fence(timeout)
        finally:
            self._end()

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the other members may never call close
            self._end()

    def __repr__(self) -> str:
        what = f"{self.array.size} of {self._layout.counts} elements of {self.array.dtype.name}"
        return f"<Window of {what} on {self._queue}{', closed' if self._closed else ''}>"

    def _end(self) -> None:
        self._closed = True
        windows = self._queue.state.windows
        if isinstance(windows, WindowService):
            windows.withdraw(self._number)

    # ------------------------------------------------------------------ helpers

    @property
    def _own(self) -> MappedMemory:
        own = self._targets[self._queue.rank]
        assert isinstance(own, MappedMemory)
        return own

    def _post(
        self,
        kind: Kind,
        place: int,
        act: Callable[[Target, Call | None], bool],
        timeout: Timeout | None,
    ) -> None:
        """Start an operation without a reply, as a call of the group if sending has to wait."""
        target = self._targets[place]
        if not act(target, None):
            self._wait(kind, place, lambda _, call: act(target, call), timeout)
        if not target.direct:  # after sending: another thread may flush in between
            self._unflushed.add(place)

    def _do(
        self,
        kind: Kind,
        place: int,
        act: Callable[[Target, Call | None], T],
        timeout: Timeout | None,
    ) -> T:
        """Return ``act(target, call)``, as a call of the group unless the memory is mapped here."""
        target = self._targets[place]
        if target.direct:
            return act(target, None)
        return self._wait(kind, place, lambda _, call: act(target, call), timeout)

    def _wait(
        self,
        kind: Kind,
        place: int,
        run: Callable[[Communicator, Call], T],
        timeout: Timeout | None,
    ) -> T:
        return self._queue.issue(CallSpec(kind, run, peer=place), timeout=timeout)

    def _check_wait(self, communicator: Communicator, call: Call, place: int, what: str) -> None:
        """Raise if waiting for the member ``place`` is pointless; ``what`` describes its state."""
        call.waiting_for = place
        look()
        if call.deadline.expired:
            who, seconds = communicator.membership.describe(place), call.deadline.seconds
            raise CommunicatorTimeoutError(f"{who} {what} within {seconds:g} s", place)
        communicator.check_peer(place)
        self._targets[place].check(call)

    def _fetch(
        self,
        value: Any,
        expected: Any,
        dst: int | None,
        group_dst: int | None,
        offset: int,
        how: int,
        timeout: Timeout | None,
    ) -> Any:
        place = self._place(dst, group_dst)
        code, new = self._layout.code(), self._layout.element(value, "value")
        old = b"" if expected is None else self._layout.element(expected, "expected")
        at = self._layout.at(offset, 1, place)
        before = self._do(
            Kind.UPDATE, place, lambda to, call: to.update(call, at, code, how, new, old), timeout
        )
        return np.frombuffer(before, self.array.dtype)[0]

    def _check_open(self) -> None:
        state = self._queue.state
        if not state.usable:
            self._queue.failure.mark_reported()
            raise state.unusable()
        if self._closed:
            raise ValueError(f"{self!r} was closed; make another one with window()")

    def _place(self, dst: int | None, group_dst: int | None) -> int:
        self._check_open()
        return resolve_rank(self._group, dst, group_dst, "dst")


def _bytes(flat: Flat) -> Flat:
    return flat.view(np.uint8)


def _meet(communicator: Communicator, call: Call) -> None:
    communicator.barrier(call)
