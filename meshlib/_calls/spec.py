"""``CallSpec``: the description of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshlib._native import calls as native
from meshlib._recording.recorder import COLLECTIVE
from transport._calls.call import Call
from transport._calls.header import NO_ROOT, Kind
from transport._communicators.base import Communicator
from transport._operands.reduce_op import Flat

Run = Callable[[Communicator[Any], Call], Any]
"""Makes a call in its turn and returns the result."""


class Overlapping:
    """A ``Run`` that makes one call of the communicator and returns ``finish()``.

    The call may overlap with the next one (``transport._calls.call.CallTail``). Then ``end`` waits
    for its last frames before ``finish()``. ``memory`` is all memory that the call reads or writes.
    """

    __slots__ = ("_run", "finish", "memory")

    def __init__(
        self,
        run: Callable[[Communicator[Any], Call], object],
        memory: Sequence[Flat],
        finish: Callable[[], Any],
    ) -> None:
        self._run = run
        self.memory: Sequence[Flat] = memory
        self.finish: Callable[[], Any] = finish

    def may_follow(self, other: Overlapping) -> bool:
        """True if the call may begin before ``other`` has ended: they have no memory in common."""
        mine, its = (
            [(flat.ctypes.data, flat.ctypes.data + flat.nbytes) for flat in call.memory]
            for call in (self, other)
        )
        return not any(a < d and c < b for a, b in mine for c, d in its)

    def __call__(self, communicator: Communicator[Any], call: Call) -> Any:
        """Make the call; return its result, unless the last frames are left."""
        self._run(communicator, call)
        rest = call.rest
        if rest is not None:
            rest.end_before()
            if rest.wait is not None:
                return None
            call.rest = None
        return self.finish()

    def end(self, _communicator: Communicator[Any], call: Call) -> Any:
        """Wait for the last frames that are left; return the call's result."""
        rest = call.rest
        assert rest is not None
        assert rest.wait is not None
        rest.wait()
        call.rest = None
        return self.finish()


class Unended(NamedTuple):
    """A call that still waits for its last frames. ``end`` waits for them; it does not raise."""

    run: Overlapping
    end: Callable[[], object]


class CallSpec:
    """The description of a call: ``run`` makes it, with the communicator for ``device``.

    The fields ``elements`` to ``extra`` must be equal on every member (see ``CallHeader``);
    ``dtype`` and ``op`` are wire codes. Records show ``nbytes``. A ``peer`` (a group rank or
    ``ANY_SOURCE``) marks a point-to-point call, whose tag is ``extra``. Immutable.
    """

    __slots__ = (
        "device",
        "dtype",
        "elements",
        "extra",
        "kind",
        "nbytes",
        "op",
        "peer",
        "root",
        "run",
    )

    def __init__(
        self,
        kind: Kind,
        run: Run,
        elements: int = 0,
        root: int = NO_ROOT,
        dtype: int = 0,
        op: int = 0,
        extra: int = 0,
        nbytes: int = 0,
        device: str = "cpu",
        peer: int = COLLECTIVE,
    ) -> None:
        # The compiled core replaces this class, because every call creates an instance.
        self.kind: Kind = kind
        self.run: Run = run
        self.elements: int = elements
        self.root: int = root
        self.dtype: int = dtype
        self.op: int = op
        self.extra: int = extra
        self.nbytes: int = nbytes
        self.device: str = device
        self.peer: int = peer


PythonsCallSpec = CallSpec
if native is not None and not TYPE_CHECKING:
    CallSpec = native.CallSpec
