"""A member's part of a window as this process maps it: loads, stores and updates of whole elements.

The same functions make all updates of a member's memory. A process that maps it calls them, or the
member itself for the sender of a message. So updates of both kinds are atomic to each other.
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
"""The dtype of the words that windows themselves keep."""
_NAMES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float32 float64"
DTYPES = {dtype_code(dtype): dtype for dtype in map(np.dtype, _NAMES.split())}
"""The dtypes whose elements can be updated as a whole, by code."""
REPLACE, REPLACE_IF = 0, 16
"""Ops of updates beside those of ``ReduceOp``: REPLACE_IF replaces what equals what is expected."""
OPS = {op.code: op for op in map(ReduceOp, (*RedOpType,)[:-1]) if op.kind is not RedOpType.AVG}
"""The ops of updates, by code."""
SLICE_SECONDS = 0.05
"""The longest wait after which a caller looks at its deadline, signals and lost peers."""

Late = Callable[[bytes | memoryview], object]


class Target(Protocol):
    """A member's bytes of a window. Without a ``call``, nothing waits, and ``put`` and ``combine``
    return False where they would have to: they have done nothing then.
    """

    direct: bool
    """True if this process maps the memory: then everything is done at once, without a ``call``."""

    def put(self, call: Call | None, offset: int, values: Flat) -> bool:
        """Store ``values`` at ``offset``; they are copied."""
        ...

    def get(self, call: Call | None, offset: int, nbytes: int) -> Flat | memoryview:
        """Return the ``nbytes`` at ``offset``, perhaps as a view."""
        ...

    def combine(
        self, call: Call | None, offset: int, code: int, op: int, values: Any, wakes: bool = False
    ) -> bool:
        """Combine the elements at ``offset`` with ``values`` by ``op``, each as a whole.

        ``code`` is that of their dtype. ``wakes``: waits for the word at ``offset`` go on.
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
        """As ``combine``; return the old values. ``expected`` is that of REPLACE_IF.

        ``late`` is called with what was there if that is known only after the call's deadline.
        """
        ...

    def flush(self, call: Call | None) -> None:
        """Return when all that this process did there is done, and can be seen."""
        ...

    def check(self, call: Call) -> None:
        """Raise ``PeerLostError`` if the member is known to be lost."""
        ...


class MappedMemory:
    """The target whose bytes are ``data`` here. Thread-safe."""

    direct = True

    def __init__(self, data: Flat) -> None:
        self.data = data
        # Without the compiled core no memory is mapped twice: all updates are made by this object.
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
