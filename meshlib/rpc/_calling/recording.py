"""The flight record of remote calls, as caller and as server.

These records have their own ring, so thousands of calls do not evict a waiting collective. Both
sides identify a call by its caller's rank and number. A call that is made while another is served
refers to that one (``parent``), so ``meshlib._trace.chains`` can follow chains of calls, even past
workers without a record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType

from meshlib._recording.recorder import FlightRecorder, Record
from meshlib.rpc._calling.execution import CallId, ServedCall
from meshlib.rpc._calling.futures import name_of
from meshlib.rpc._errors import safely
from transport._calls.header import NO_ROOT, Kind, pack_header

_NOWHERE = -1
"""The instruction in a record of a function that is not Python or not yet known."""


class CallRecord(Record):
    """A remote call. ``label`` is the function's name, ``peer`` the rank at the other end.

    The header has the call's number as ``sequence``, and the id of its parent: the caller's rank as
    ``root``, the number as ``elements``. The site of a served call is the function itself.
    """

    __slots__ = ()

    @property
    def kind(self) -> str:
        """The function's name."""
        return self.label or "?"

    @property
    def site(self) -> str:
        """The user's line; empty if the function is not Python or not yet known."""
        return "" if self.instruction == _NOWHERE else super().site


class CallRecorder:
    """The last ``capacity`` calls of one worker, and all its running calls.

    Flight records show them as calls of a group named ``group``.
    """

    group_desc = "rpc"

    def __init__(self, group: str, ranks: Sequence[int], capacity: int) -> None:
        self.id = group
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.workers: Sequence[str] = ()
        """The workers' names, by rank."""
        self.under_way: Callable[[], list[Record]] = list[Record]
        self._recorder = FlightRecorder(capacity, CallRecord)
        self._open = self._recorder.open

    def made(
        self, number: int, to: int, name: str, nbytes: int, seconds: float, parent: CallId | None
    ) -> Record:
        """Record that this worker calls ``name`` on worker ``to``, in the call ``parent``."""
        root, elements = parent or (NO_ROOT, 0)
        packed = pack_header(number, elements, root, Kind.CALL, 0, 0, 0, 0, 0)
        record = self._open(self.id, packed, nbytes, to, False, seconds)
        record.label, record.started = name, record.issued
        return record

    def served(self, call: ServedCall, error: str | None) -> None:
        """Record that a call has been served, with ``error`` if it failed."""
        packed = _packed_served(call)
        record = self._open(self.id, packed, call.nbytes, call.id[0], False, 0.0)
        _fill(record, call)
        record.end(error)

    def being_served(self, call: ServedCall) -> Record:
        """Return the record of a served call that has not ended."""
        caller, code = call.id[0], self.being_served.__code__
        record = CallRecord(
            *(_packed_served(call), False, self.id, call.nbytes, caller, 0.0, None), 0, code, 0
        )
        _fill(record, call)
        return record

    def records(self) -> list[Record]:
        """Return the records, oldest first, including all running calls."""
        found = {id(record): record for record in self._recorder.records()}
        found |= {id(record): record for record in self.under_way()}
        return sorted(found.values(), key=lambda record: record.issued)

    def close(self) -> None:
        """Freeze the list of running calls, when the worker ends."""
        left = self.under_way()
        self.under_way = lambda: left


def _packed_served(call: ServedCall) -> bytes:
    root, elements = call.parent or (NO_ROOT, 0)
    return pack_header(call.id[1], elements, root, Kind.SERVE, 0, 0, 0, 0, 0)


def _fill(record: Record, call: ServedCall) -> None:
    func = call.func
    record.issued = call.arrived
    if call.thread is not None:
        record.started, record.thread = call.begun, call.thread
    if func is not None:
        record.label = name_of(func)
    code = safely(lambda: getattr(func, "__code__", None), None)
    record.instruction = 0 if isinstance(code, CodeType) else _NOWHERE
    if isinstance(code, CodeType):
        record.code = code
