"""Access to a member's memory of a window: loads, stores, and atomic updates of elements.

The same functions make all updates of a member's memory: a process that maps the memory calls them
directly, and the member itself calls them for messages. So all updates are mutually atomic.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import Any, Protocol

import numpy as np

from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._native import core
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp

WORD = np.dtype(np.uint64)
"""The dtype of the words that windows use internally."""
_NAMES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float32 float64"
DTYPES = {dtype_code(dtype): dtype for dtype in map(np.dtype, _NAMES.split())}
"""The dtypes that support atomic updates, by code."""
REPLACE, REPLACE_IF = 0, 16
"""Ops of updates in addition to ``OPS``. REPLACE_IF replaces elements that equal ``expected``."""
OPS = {op.code: op for op in map(ReduceOp, (*RedOpType,)[:-1]) if op.kind is not RedOpType.AVG}
"""The ops of updates, by code."""
SLICE_SECONDS = 0.05
"""The longest time between checks for the deadline, signals and lost peers."""

Late = Callable[[bytes | memoryview], object]


class Target(Protocol):
    """A member's memory of a window.

    Without a ``call``, no method waits. ``put`` and ``combine`` then do nothing and return False if
    they would have to wait.
    """

    direct: bool
    """True if this process maps the memory. Every method then finishes without a ``call``."""

    def put(self, call: Call | None, offset: int, values: Flat) -> bool:
        """Copy ``values`` to the byte ``offset``."""
        ...

    def get(self, call: Call | None, offset: int, nbytes: int) -> Flat | memoryview:
        """Return ``nbytes`` bytes at ``offset``, possibly as a view."""
        ...

    def combine(
        self, call: Call | None, offset: int, code: int, op: int, values: Any, wakes: bool = False
    ) -> bool:
        """Combine the elements at ``offset`` with ``values`` by ``op``, each atomically.

        ``code`` is the wire code of their dtype. ``wakes`` wakes waits for the word at ``offset``.
        """
        ...

    def update(
        self,
        call: Call | None,
        offset: int,
        code: int,
        op: int,
        values: Any,
        expected: Any = b"",
        late: Late | None = None,
    ) -> bytes:
        """Combine as ``combine`` does, and return the old values. REPLACE_IF needs ``expected``.

        If the old values arrive only after the call's deadline, ``late`` is called with them.
        """
        ...

    def flush(self, call: Call | None) -> None:
        """Wait until all earlier operations of this process are done and visible."""
        ...

    def check(self, call: Call) -> None:
        """Raise ``PeerLostError`` if the member is known to be lost."""
        ...


class MappedMemory:
    """A target whose memory this process maps as ``data``. Thread-safe."""

    direct = True

    def __init__(self, data: Flat) -> None:
        self.data = data
        # Without the compiled core, only one process maps the memory, and makes all its updates.
        self._updates = Condition()

    def put(self, call: Call | None, offset: int, values: Flat | memoryview | bytes) -> bool:
        data = np.frombuffer(values, np.uint8)
        self.data[offset : offset + data.size] = data
        return True

    def get(self, call: Call | None, offset: int, nbytes: int) -> Flat:
        return self.data[offset : offset + nbytes]

    def combine(
        self, call: Call | None, offset: int, code: int, op: int, values: Any, wakes: bool = False
    ) -> bool:
        self._update(offset, code, op, values, b"", wakes)
        return True

    def update(
        self,
        call: Call | None,
        offset: int,
        code: int,
        op: int,
        values: Any,
        expected: Any = b"",
        late: Late | None = None,
    ) -> bytes:
        return self._update(offset, code, op, values, expected, False)

    def _update(
        self, offset: int, code: int, op: int, values: Any, expected: Any, wakes: bool
    ) -> bytes:
        dtype = DTYPES[code]
        if core is not None:
            return core.update_window(
                self.data, offset, dtype.itemsize, code, op, values, expected, wakes
            )
        new = np.frombuffer(values, dtype)
        with self._updates:
            here = self.data[offset : offset + new.nbytes].view(dtype)
            before = here.tobytes()
            if op == REPLACE_IF:
                np.copyto(here, new, where=here == np.frombuffer(expected, dtype))
            elif op == REPLACE:
                here[:] = new
            else:
                with np.errstate(all="ignore"):
                    OPS[op].combine(here, new, here)
            self._updates.notify_all()
        return before

    def flush(self, call: Call | None) -> None:
        if core is not None:
            core.fence()

    def check(self, call: Call) -> None:
        """Do nothing: ``Communicator.check_peer`` checks for lost members."""

    def await_word(self, offset: int, seen: int) -> int:
        """Return the word at ``offset`` once it is not ``seen``, or after ``SLICE_SECONDS``."""
        if core is not None:
            return core.await_word(self.data, offset, seen)
        word = self.data[offset : offset + WORD.itemsize].view(WORD)
        with self._updates:
            if int(word[0]) == seen:
                self._updates.wait(SLICE_SECONDS)
            return int(word[0])
