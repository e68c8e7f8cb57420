"""Calls that compiled programs make without the interpreter: ``meshlib/_native/jit`` makes them.

A ``CallSpec`` defines a call. This module runs it on a stand-in for a shared-memory communicator,
which records the arrays that the engine would get, and finds their places in the program's buffers.
Python makes the first calls of a program, and later any unusual call. After each usual call, Python
lets compiled code make calls for another ``MOMENT``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import jax
import numpy as np

from meshlib._calls.spec import CallSpec
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from meshlib._native import calls as native
from meshlib._recording.recorder import CAPACITY, COLLECTIVE, Record
from meshlib.jit._xla.call_site import CallSite
from meshlib.jit._xla.program import HostArray, HostFunction, Program, state_in_jit
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._operands.reduce_op import Flat, ReduceOp
from transport._shm.communicator import ShmCommunicator
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import next_slice

MOMENT = 0.05
"""Seconds for which compiled code may make calls before Python checks again. Equal to the engine's
interval between two checks of signals and deadlines."""

handler: Any = None if native is None else native.xla_handler
"""XLA's handler, as a capsule; None if the core was built without XLA's header."""

Spec = Callable[[HostArray, HostArray], CallSpec]


class _EngineCallCapture(ShmCommunicator):
    """A communicator that only records the arguments of a call to the engine."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.inputs: Sequence[Flat] = ()
        self.outputs: Sequence[Flat] = ()
        self.op: ReduceOp | None = None

    def _run(
        self,
        kind: Kind,
        root: int,
        call: Call,
        inputs: Sequence[Flat] = (),
        outputs: Sequence[Flat] = (),
        op: ReduceOp | None = None,
    ) -> None:
        self.inputs, self.outputs, self.op = inputs, outputs, op

    def send(self, call: Call, buffer: Flat, dst: int, tag: int) -> None:
        self.inputs = [buffer]

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        self.outputs = [buffer]
        return 0 if src is None else src


class DirectCall(NamedTuple):
    """A call of ``group`` on one operand and one result, for compiled code.

    ``spec`` is Python's description of the call. With ``clears`` no data arrives, and the result is
    zeros.
    """

    group: ProcessGroup
    spec: Spec
    operand: jax.ShapeDtypeStruct
    result: jax.ShapeDtypeStruct
    peer: int
    in_place: bool
    clears: bool
    only_sends: bool
    """True if the call has no result: ``spec`` then gets the operand in the result's place."""
    sending: DirectCall | None = None
    """The other half of an exchange, with the same operand."""

    def compile(
        self,
        code: CodeType,
        owner: DirectCallback,
        itemsizes: Sequence[int],
        half: bool = False,
    ) -> Any:
        """Return the ``ProgramCall``, for which ``owner`` is the fallback in Python.

        The call is recorded at the first line of ``code``. ``itemsizes`` are those of the program's
        operands.
        """
        group = self.group
        result = np.empty(self.result.shape, self.result.dtype)
        operand = result if self.in_place else np.empty(self.operand.shape, self.operand.dtype)
        given = (operand, operand) if self.only_sends else (result, operand)
        spec, recorder = self.spec(*given), _EngineCallCapture(group.rank(), group.size())
        spec.run(recorder, None)  # type: ignore[arg-type]
        arrays = [(0, operand), (len(itemsizes), result)] if itemsizes else [(0, result)]
        places = [_place(array, arrays) for array in (*recorder.inputs, *recorder.outputs)]
        alone = spec.peer == group.rank() and self.sending is None and not half
        calls = None if alone else program_calls(group)
        sending = self.sending and self.sending.compile(code, owner, itemsizes, half=True)
        fields = (spec.elements, spec.root, spec.kind, spec.dtype, spec.op, spec.extra)
        return native.ProgramCall(  # type: ignore[union-attr]
            sending,
            calls and calls.native,
            owner,
            fields,
            recorder.op is not None,
            spec.nbytes,
            spec.peer,
            calls.number_of(code) if calls else 0,
            self.clears,
            tuple(itemsizes),
            () if self.only_sends and not half else (result.itemsize,),
            len(recorder.inputs),
            places,
        )

    def go_on_at(self, site: CallSite | None) -> Callable[[bytes, HostArray, HostArray], None]:
        """Return ``go_on`` as if it were written at ``site``."""
        go_on = self.go_on

        def named(header: bytes, output: HostArray, x: HostArray) -> None: return go_on(header, output, x)  # fmt: skip # noqa: E501

        return named if site is None else site.name(named)

    def go_on(self, header: bytes, output: HostArray, x: HostArray) -> None:
        """Finish a call that compiled code has begun."""
        call_queue_of(self.group).take_over(header, self.spec(output, x))
        if self.clears:
            output.fill(0)


class DirectCallback:
    """The fallback of ``direct`` in Python, for calls that compiled code does not make or finish.

    Runs ``function``, or ``go_on(header, output, x)`` if compiled code has begun the call.
    ``compile`` returns the object for XLA. ``operands`` are the shapes and dtypes of the program's
    operands, beginning with the call's own.
    """

    def __init__(
        self,
        direct: DirectCall,
        program: Program,
        function: HostFunction,
        go_on: Callable[[bytes, HostArray, HostArray], None],
        operands: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        self.program = program
        self._direct = direct
        self._function = function
        self._go_on = go_on
        results = [] if direct.only_sends else [direct.result]
        self._buffers = [(b.dtype, b.shape) for b in (*operands, *results)]

    def compile(self) -> Any:
        """Return a new ``ProgramCall``, which refers to this object; never store it here."""
        count = len(self._buffers) - (not self._direct.only_sends)
        itemsizes = [np.dtype(dtype).itemsize for dtype, _ in self._buffers[:count]]
        return self._direct.compile(self._go_on.__code__, self, itemsizes)

    def make(self, header: bytes | None, views: Sequence[memoryview]) -> None:
        """Make the call; with ``header``, finish the call that compiled code began."""
        direct = self._direct
        inputs = [
            np.frombuffer(view, dtype).reshape(shape)
            for view, (dtype, shape) in zip(views, self._buffers, strict=True)
        ]
        output = inputs[0] if direct.only_sends else inputs.pop()
        try:
            if header is None:
                self._function([output], inputs, self.program)
            else:
                self._go_on(header, output, output if direct.in_place else inputs[0])
        except BaseException as error:  # any error ends the program
            self.program.fail(error)
            raise
        calls = program_calls(direct.group)
        if calls is not None:
            for part in (direct.sending, direct):
                if part is not None:
                    calls.reopen(part.peer)


def _place(array: Flat, arrays: Sequence[tuple[int, HostArray]]) -> tuple[int, int, int]:
    """Return the entry of ``arrays`` that contains an array, its offset and its length in bytes."""
    start = array.ctypes.data
    for number, whole in reversed(arrays):
        offset = start - whole.ctypes.data
        if 0 <= offset <= whole.nbytes - array.nbytes and (array.nbytes or not offset):
            return number, offset, array.nbytes
    if array.nbytes:
        raise AssertionError("a call may use only its operand and its result")
    return arrays[0][0], 0, 0


class ProgramCalls:
    """The calls of ``group`` that compiled programs make; see ``meshlib/_native/jit``."""

    def __init__(self, group: ProcessGroup) -> None:
        self._queue = queue = call_queue_of(group)
        context = queue.context
        order, recorder = queue.state.order, context.recorder
        place = group.rank(), group.size()
        self.native: Any = native.ProgramCalls(order, recorder, context.observers, *place, CAPACITY)  # type: ignore[union-attr]
        self._codes: dict[CodeType, int] = {}
        self._kept: dict[int, Record] = {}
        recorder.sources.append(self._records)

    def number_of(self, code: CodeType) -> int:
        """Return the number under which calls are recorded for the first line of ``code``."""
        return self._codes.setdefault(code, len(self._codes))

    def reopen(self, peer: int) -> None:
        """Let compiled code make calls for another ``MOMENT``, unless something is unusual."""
        native, state, context = self.native, self._queue.state, self._queue.context
        native.open(0)
        communicator = state.communicators.get("cpu")
        if communicator is None or not state.usual or context.log.detailed:
            return
        if peer != COLLECTIVE:
            lent = communicator.lend_rings(peer)
            if peer == self._queue.rank:
                native.set_self(lent is not None)
            elif lent is not None:
                native.connect(peer, *lent)
        handle = communicator.native_handle()
        if handle is None or native.attach(handle):
            native.open(MOMENT)

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for a running call, then leave all calls to Python."""
        deadline = Deadline.after(seconds)
        while self.native.busy and not deadline.expired:
            time.sleep(next_slice(1e-3))
        self.native.open(0)
        recorder = self._queue.context.recorder
        recorder.past.extend(self._records())
        recorder.sources.remove(self._records)

    def _records(self) -> list[Record]:
        """Return the records of the calls, oldest first; records of ended calls are cached."""
        codes, kept = list(self._codes), self._kept
        records = self._kept = {}
        for number, packed, issued, ended, nbytes, peer, site, thread in self.native.entries():
            record = kept.get(number)
            if record is None or not record.ended:
                members = self._queue.members
                code = codes[site]
                record = Record(
                    packed, True, members.id, nbytes, peer, members.seconds, None, thread, code, 0
                )
                record.issued = record.started = issued
                record.ended = ended
            records[number] = record
        return list(records.values())


def program_calls(group: ProcessGroup) -> ProgramCalls | None:
    """Return the object that makes the calls of ``group`` in compiled programs, or None."""
    if handler is None or sys.is_finalizing():
        return None
    state = state_in_jit(group)
    if state.calls is None:
        state.calls = ProgramCalls(group)
    return state.calls
