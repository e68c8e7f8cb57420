"""Collectives in the engine: error handling, and reductions of dtypes that it does not support.

The engine returns within 50 milliseconds. Before Python calls it again, it handles signals, and
``check`` checks deadlines and lost members.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transport._calls.call import Call
from transport._calls.header import CallHeader, Kind
from transport._communicators.runtime import Membership
from transport._errors import DistBackendError, HeaderMismatchError, PeerLostError
from transport._operands.flat import Scratch
from transport._operands.operand import store
from transport._operands.quiet import quietly
from transport._operands.reduce_op import Flat, ReduceOp
from transport._shm.numpy_reductions import reduce_parts, scaled
from transport._shm.segment import Segment, no_memory
from transport._shm.sizes import Sizes
from transport._shm.support import may_spin, the_core
from transport._waiting.interrupts import look

Check = Callable[[Call, int], None]
"""Called with a call and the group rank of the awaited member (-1: none); raises if the call cannot
complete.
"""

_NO_MEMBER = -1
_NO_DTYPE = np.dtype(np.uint8)


class Calls:
    """The collectives of one member, among the two or more ``members`` that share ``segment``.

    One thread at a time. ``native`` is the engine's ``Group`` on the segment.
    """

    def __init__(
        self,
        segment: Segment,
        sizes: Sizes,
        membership: Membership,
        members: Sequence[int],
        check: Check,
    ) -> None:
        self._core = core = the_core()
        self.segment = segment
        self._membership = membership
        self._members = members
        self._check = check
        self._scratch = Scratch()
        rank, size = members.index(membership.rank), len(members)
        given = (sizes.direct, sizes.unstaged)
        spins = may_spin(size)
        try:
            self.native: Any = core.Group(segment.mapping, rank, size, given, spins)
        except ValueError as error:
            raise DistBackendError(
                f"the group's shared memory: {error}; expected the same version on all ranks"
            ) from error

    def run(
        self,
        kind: int,
        root: int,
        call: Call,
        inputs: Sequence[Flat],
        outputs: Sequence[Flat],
        op: ReduceOp | None = None,
    ) -> None:
        """Run a call with the arrays of the ``Communicator`` method for that ``Kind``.

        ``root`` is 0 for kinds without one. ``inputs`` and ``outputs`` have one array per member,
        one for all, or none. An array that is reduced in place is an output.
        """
        if op is not None and op.factor is not None:
            self._run_scaled(kind, root, call, inputs, outputs, op)
            return
        status = self.native.start(kind, root, call, inputs, outputs, 0 if op is None else op.code)
        if status:
            arrays = [*inputs, *outputs]
            dtype = arrays[0].dtype if arrays else _NO_DTYPE
            self._go_on(call, status, op, dtype)

    def resume(self, call: Call, status: int) -> None:
        """Continue a call that compiled code began. The engine supports its reduction, if any."""
        self._go_on(call, status, None, _NO_DTYPE)

    def wake(self) -> None:
        """Wake all sleeping members, so that they check for errors. Thread-safe."""
        self.native.wake()

    def _go_on(
        self, call: Call, status: int, op: ReduceOp | None, dtype: np.dtype[np.generic]
    ) -> None:
        """Continue a call on arrays of ``dtype`` until it is done."""
        core, native = self._core, self.native
        while status != core.DONE:
            if status == core.AGAIN:
                status = self._look_up(call)
            elif status == core.UNSUPPORTED and op is not None:
                self._reduce_parts(op, dtype)
                status = native.go_on()
            else:
                raise self._explain(call)
        call.waiting_for = None

    def _look_up(self, call: Call) -> int:
        look()
        native = self.native
        number = native.waits_for
        peer = _NO_MEMBER
        if number != _NO_MEMBER:
            peer = call.waiting_for = self._members[number]
        try:
            self._check(call, peer)
        except PeerLostError:
            # The peer's last step may have become visible just before it left.
            status = native.go_on()
            if status == self._core.AGAIN and native.waits_for == number:
                raise
            return status
        return native.go_on()

    @quietly
    def _reduce_parts(self, op: ReduceOp, dtype: np.dtype[np.generic]) -> None:
        parts, out = self.native.parts()
        arrays = [np.frombuffer(part, dtype) for part in parts]
        reduce_parts(self._scratch, arrays, op, np.frombuffer(out, dtype))

    @quietly
    def _run_scaled(
        self,
        kind: int,
        root: int,
        call: Call,
        inputs: Sequence[Flat],
        outputs: Sequence[Flat],
        op: ReduceOp,
    ) -> None:
        """Run a PREMUL_SUM, as a sum of scaled copies in the reduction's dtype."""
        copies = [scaled(input_, op) for input_ in inputs]
        if kind == Kind.REDUCE_SCATTER:
            results = [np.empty(outputs[0].size, copies[0].dtype)]
        else:  # reduced in place
            results = [scaled(output, op) for output in outputs]
        self.run(kind, root, call, copies, results, op.plain)
        for output, result in zip(outputs, results, strict=True):
            store(output, result)

    def _explain(self, call: Call) -> Exception:
        """Return the error for the engine's problem."""
        core = self._core
        trouble, number, ours, theirs, found, wanted = self.native.problem()
        peer = self._members[number]
        name, header = self._membership.describe(peer), call.header
        if trouble == core.OTHER_CALL:
            own, received = CallHeader.unpack(ours), CallHeader.unpack(theirs)
            text = f"this rank is in {own}, {name} in {received}"
            return HeaderMismatchError(text, peer, own, received)
        if trouble == core.SENT:
            text = f"{name} sent {found} bytes in {header}, expected {wanted}"
            return HeaderMismatchError(text, peer, header, header)
        if trouble == core.EXPECTS:
            text = f"{name} expects {found} bytes in {header}, got {wanted} bytes"
            return HeaderMismatchError(text, peer, header, header)
        if trouble == core.NO_MEMORY:
            return no_memory(name, wanted, OSError(found, os.strerror(found)))
        what = f"published step {found:#x}, expected about {wanted:#x}"
        if trouble == core.BAD_PLACE:
            what = f"published place {found:#x} for {wanted} bytes, where it has no memory"
        return DistBackendError(f"{name} {what}, in {header}: the shared memory is damaged")
