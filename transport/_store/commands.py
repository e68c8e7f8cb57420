"""The commands on a store's data, whose arguments and answers are lists of bytes (fields).

A ``HashStore`` runs them under a lock, a ``FileStore`` from a log, a ``TCPStore`` over a
connection.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from transport._store.fields import unpack_number
from transport._store.table import KeysWaiter, PopWaiter, StoreTable, TailWaiter, Waiter

Fields = Sequence[bytes]
Deliver = Callable[[Waiter], None]

_WORKERS = b"workers"


class Op(enum.IntEnum):
    """A command's number, part of the wire and file formats: append, never renumber."""

    SET = 1
    GET = 2
    ADD = 3
    APPEND = 4
    CHECK = 5
    COMPARE_SET = 6
    DELETE = 7
    MULTI_GET = 8
    MULTI_SET = 9
    NUM_KEYS = 10
    WAIT = 11
    PUSH = 12
    POP = 13
    TRY_POP = 14
    QUEUE_LEN = 15
    TAIL = 16
    SET_WILL = 17
    JOIN = 18
    WAIT_WORKERS = 19
    GOODBYE = 20
    CANCEL = 21
    NUM_WORKERS = 22
    LIST_KEYS = 23


CHANGES = frozenset(
    {Op.SET, Op.ADD, Op.APPEND, Op.COMPARE_SET, Op.DELETE, Op.MULTI_SET, Op.PUSH, Op.TRY_POP}
)
"""The commands that may change users' data. They never wait, so a log of them can be replayed."""


def wanted(op: Op) -> str:
    """Return the words before the awaited keys in a message."""
    if op == Op.POP:
        return "a value in queue"
    return "more at the end of key" if op == Op.TAIL else "key"


Answer = Callable[[Fields], Fields | None]
MakeWaiter = Callable[[Fields, Deliver], tuple[StoreTable, Waiter]]


def _nothing(method: Callable[..., None]) -> Answer:
    """Return the command that calls ``method`` and answers without fields."""

    def answer(fields: Fields) -> Fields:
        method(*fields)
        return ()

    return answer


def _found(method: Callable[..., bytes | None]) -> Answer:
    """Return the command that answers with the result of ``method``; None: no answer yet."""

    def answer(fields: Fields) -> Fields | None:
        value = method(*fields)
        return None if value is None else (value,)

    return answer


def _number(method: Callable[..., int]) -> Answer:
    """Return the command that answers with the result of ``method``, an int or a bool."""
    return lambda fields: (b"%d" % method(*fields),)


class Commands:
    """The commands on one table. Wrong fields raise ValueError or TypeError. Not thread-safe."""

    def __init__(self) -> None:
        self.table = table = StoreTable()
        # A separate table, so that num_keys does not count its keys, and no user's key collides.
        internal = StoreTable()

        def add(key: bytes, amount: bytes) -> int:
            return table.add(key, int(amount))

        def multi_set(*fields: bytes) -> None:
            for key, value in zip(fields[::2], fields[1::2], strict=True):
                table.set(key, value)

        def join() -> int:
            internal.append(_WORKERS, b".")
            return internal.size(_WORKERS)

        pop = _found(table.pop)
        self._at_once: dict[int, Answer] = {
            Op.SET: _nothing(table.set),
            Op.GET: _found(table.get),
            Op.ADD: _number(add),
            Op.APPEND: _nothing(table.append),
            Op.CHECK: _number(lambda *keys: not table.missing(keys)),
            Op.COMPARE_SET: _found(table.compare_set),
            Op.DELETE: _number(table.delete),
            Op.MULTI_SET: _nothing(multi_set),
            Op.NUM_KEYS: _number(lambda: len(table)),
            Op.LIST_KEYS: lambda _: table.keys(),
            Op.PUSH: _nothing(table.push),
            Op.TRY_POP: lambda fields: pop(fields) or (),
            Op.QUEUE_LEN: _number(table.queue_len),
            Op.JOIN: _number(join),
            Op.NUM_WORKERS: _number(lambda: internal.size(_WORKERS)),
        }

        def values(keys: Fields, deliver: Deliver) -> tuple[StoreTable, Waiter]:
            return table, KeysWaiter(keys, deliver, values=True)

        def queue(fields: Fields, deliver: Deliver) -> tuple[StoreTable, Waiter]:
            (key,) = fields
            return table, PopWaiter([key], deliver)

        def tail(fields: Fields, deliver: Deliver) -> tuple[StoreTable, Waiter]:
            key, offset = fields
            return table, TailWaiter(key, unpack_number(offset), deliver)

        def workers(fields: Fields, deliver: Deliver) -> tuple[StoreTable, Waiter]:
            (count,) = fields
            return internal, TailWaiter(_WORKERS, unpack_number(count) - 1, deliver)

        self._waits: dict[int, MakeWaiter] = {
            Op.GET: values,
            Op.MULTI_GET: values,
            Op.WAIT: lambda keys, deliver: (table, KeysWaiter(keys, deliver, values=False)),
            Op.POP: queue,
            Op.TAIL: tail,
            Op.WAIT_WORKERS: workers,
        }

    def answer(self, op: int, fields: Fields) -> Fields | None:
        """Return the answer to a command; None if it must wait (then call ``waiter``)."""
        run = self._at_once.get(op)
        return None if run is None else run(fields)

    def waiter(self, op: int, fields: Fields, deliver: Deliver) -> tuple[StoreTable, Waiter]:
        """Return a table, and the waiter for a command's answer, which the caller has to submit to
        the table. The waiter calls ``deliver`` once.

        Raises ValueError for an opcode that never waits.
        """
        if op not in self._waits:
            raise ValueError(f"opcode {op} is unknown")
        return self._waits[op](fields, deliver)
