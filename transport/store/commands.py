"""What may be asked of a store's data: commands with fields of bytes, answered with fields.

A ``HashStore`` has them behind a lock, a ``FileStore`` in a log, a ``TCPStore`` on a wire.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial

from transport.store.fields import unpack_number
from transport.store.table import KeysWaiter, PopWaiter, Table, TailWaiter, Waiter

Fields = Sequence[bytes]
Deliver = Callable[[Waiter], None]

_WORKERS = b"workers"


class Op(enum.IntEnum):
    """A command's number. Part of the wire's and the file's format: append, never renumber."""

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
"""The commands that may change users' data, each at once and by its fields alone."""


def wanted(op: Op) -> str:
    """Return what a command waits for, before the names of the keys."""
    if op == Op.POP:
        return "a value in queue"
    return "more at the end of key" if op == Op.TAIL else "key"


class Commands:
    """The commands over one table. Fields that are wrong raise ValueError or TypeError.

    One thread at a time.
    """

    def __init__(self) -> None:
        self.table = Table()
        # Not the users' keys: num_keys does not count them and no key can collide with them.
        self._internal = Table()
        self._at_once: dict[int, Callable[[Fields], Fields | None]] = {
            Op.SET: self._set,
            Op.GET: self._get,
            Op.ADD: self._add,
            Op.APPEND: self._append,
            Op.CHECK: self._check,
            Op.COMPARE_SET: self._compare_set,
            Op.DELETE: self._delete,
            Op.MULTI_SET: self._multi_set,
            Op.NUM_KEYS: self._num_keys,
            Op.LIST_KEYS: self._list_keys,
            Op.PUSH: self._push,
            Op.TRY_POP: self._try_pop,
            Op.QUEUE_LEN: self._queue_len,
            Op.JOIN: self._join,
            Op.NUM_WORKERS: self._num_workers,
        }
        self._waits: dict[int, Callable[[Fields], tuple[Table, Callable[[Deliver], Waiter]]]] = {
            Op.GET: self._wait_for_values,
            Op.MULTI_GET: self._wait_for_values,
            Op.WAIT: self._wait_for_keys,
            Op.POP: self._wait_for_queue,
            Op.TAIL: self._wait_for_tail,
            Op.WAIT_WORKERS: self._wait_for_workers,
        }

    def answer(self, op: int, fields: Fields) -> Fields | None:
        """Return the answer to a command that has one now, else None: then ``waiter`` has it."""
        run = self._at_once.get(op)
        return None if run is None else run(fields)

    def waiter(self, op: int, fields: Fields, deliver: Deliver) -> tuple[Table, Waiter]:
        """Return who waits for the answer to a command, for ``deliver``, and the table to submit
        it to. Raises ValueError for numbers that are no such command's.
        """
        if op not in self._waits:
            raise ValueError(f"opcode {op} is none of ours")
        table, make = self._waits[op](fields)
        return table, make(deliver)

    def _set(self, fields: Fields) -> Fields:
        key, value = fields
        self.table.set(key, value)
        return ()

    def _get(self, fields: Fields) -> Fields | None:
        (key,) = fields
        value = self.table.get(key)
        return None if value is None else (value,)

    def _add(self, fields: Fields) -> Fields:
        key, amount = fields
        return (b"%d" % self.table.add(key, int(amount)),)

    def _append(self, fields: Fields) -> Fields:
        key, value = fields
        self.table.append(key, value)
        return ()

    def _check(self, fields: Fields) -> Fields:
        return (b"1" if self.table.has_all(fields) else b"0",)

    def _compare_set(self, fields: Fields) -> Fields:
        key, expected, desired = fields
        return (self.table.compare_set(key, expected, desired),)

    def _delete(self, fields: Fields) -> Fields:
        (key,) = fields
        return (b"1" if self.table.delete(key) else b"0",)

    def _multi_set(self, fields: Fields) -> Fields:
        for key, value in zip(fields[::2], fields[1::2], strict=True):
            self.table.set(key, value)
        return ()

    def _num_keys(self, _fields: Fields) -> Fields:
        return (b"%d" % len(self.table),)

    def _list_keys(self, _fields: Fields) -> Fields:
        return self.table.keys()

    def _push(self, fields: Fields) -> Fields:
        key, value = fields
        self.table.push(key, value)
        return ()

    def _try_pop(self, fields: Fields) -> Fields:
        (key,) = fields
        value = self.table.pop(key)
        return () if value is None else (value,)

    def _queue_len(self, fields: Fields) -> Fields:
        (key,) = fields
        return (b"%d" % self.table.queue_len(key),)

    def _join(self, _fields: Fields) -> Fields:
        self._internal.append(_WORKERS, b".")
        return self._num_workers(())

    def _num_workers(self, _fields: Fields) -> Fields:
        return (b"%d" % self._internal.size(_WORKERS),)

    def _wait_for_values(self, fields: Fields) -> tuple[Table, Callable[[Deliver], Waiter]]:
        return self.table, partial(KeysWaiter, fields, values=True)

    def _wait_for_keys(self, fields: Fields) -> tuple[Table, Callable[[Deliver], Waiter]]:
        return self.table, partial(KeysWaiter, fields, values=False)

    def _wait_for_queue(self, fields: Fields) -> tuple[Table, Callable[[Deliver], Waiter]]:
        (key,) = fields
        return self.table, partial(PopWaiter, key)

    def _wait_for_tail(self, fields: Fields) -> tuple[Table, Callable[[Deliver], Waiter]]:
        key, offset = fields
        return self.table, partial(TailWaiter, key, unpack_number(offset))

    def _wait_for_workers(self, fields: Fields) -> tuple[Table, Callable[[Deliver], Waiter]]:
        (count,) = fields
        return self._internal, partial(TailWaiter, _WORKERS, unpack_number(count) - 1)
