"""What a server's clients may ask of its data: requests' fields in, answers' fields out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from transport.store.table import KeysWaiter, PopWaiter, Table, TailWaiter, Waiter
from transport.store.wire import Op, unpack_number

Fields = Sequence[bytes]
MakeWaiter = Callable[[Callable[[Waiter], None]], Waiter]

_WORKERS = b"workers"


class Commands:
    """The commands over one table. Fields that are wrong raise ValueError or TypeError."""

    def __init__(self) -> None:
        self.table = Table()
        # Not the users' keys: num_keys does not count them and no key can collide with them.
        self._internal = Table()
        self.at_once: dict[int, Callable[[Fields], Fields | None]] = {
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
        """Answered at once, unless they return None."""
        self.waits: dict[int, Callable[[Fields], tuple[Table, MakeWaiter]]] = {
            Op.GET: self._wait_for_values,
            Op.MULTI_GET: self._wait_for_values,
            Op.WAIT: self._wait_for_keys,
            Op.POP: self._wait_for_queue,
            Op.TAIL: self._wait_for_tail,
            Op.WAIT_WORKERS: self._wait_for_workers,
        }
        """Answered when a waiter is: its table, and how to make it."""

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

    def _wait_for_values(self, fields: Fields) -> tuple[Table, MakeWaiter]:
        return self.table, partial(KeysWaiter, fields, values=True)

    def _wait_for_keys(self, fields: Fields) -> tuple[Table, MakeWaiter]:
        return self.table, partial(KeysWaiter, fields, values=False)

    def _wait_for_queue(self, fields: Fields) -> tuple[Table, MakeWaiter]:
        (key,) = fields
        return self.table, partial(PopWaiter, key)

    def _wait_for_tail(self, fields: Fields) -> tuple[Table, MakeWaiter]:
        key, offset = fields
        return self.table, partial(TailWaiter, key, unpack_number(offset))

    def _wait_for_workers(self, fields: Fields) -> tuple[Table, MakeWaiter]:
        (count,) = fields
        return self._internal, partial(TailWaiter, _WORKERS, unpack_number(count) - 1)
