"""A store whose keys are in an etcd, where they outlive every process of the job.

A key is a range of etcd keys: one with the value that was set (``PREFIX/v/KEY:``), and one for each
appended piece, ordered by revision. So appending to a log is one write, and a follower gets only
the new pieces. A queue is a range of values.

A change that depends on existing data is a transaction, guarded by the revisions that were read. It
writes a mark. If the answer is lost and the request is sent again, the mark shows that etcd has
already executed it.
"""

from __future__ import annotations

import os
import random
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING
from urllib.parse import quote_from_bytes, unquote_to_bytes

from transport._errors import DistStoreError
from transport._net.tls_choice import tls_from_environment
from transport._store.arguments import key_name
from transport._store.base import DEFAULT_STORE_TIMEOUT, Store
from transport._store.commands import Commands, Fields, Op
from transport._store.etcd.address import EtcdAddress
from transport._store.etcd.client import Body, EtcdClient
from transport._store.fields import unpack_number
from transport._store.table import StoreTable, Waiter
from transport._waiting.deadline import Deadline, Timeout
from transport._waiting.interrupts import next_slice

if TYPE_CHECKING:
    from transport._net.tls import Tls

_OUTAGE_SECONDS = 30.0
"""The longest time for which a request is retried while no member answers."""
_WATCH_SECONDS = 10.0
"""The time after which a silent watch reads the key again, because its member may have died."""
_RETRY_SECONDS = 0.02
_KEYS_A_REQUEST = 50
"""etcd allows 128 operations in a transaction; setting a key takes two."""


@dataclass(frozen=True, slots=True)
class _Range:
    """etcd's keys that begin with ``name`` and a colon."""

    name: str

    @property
    def bounds(self) -> Body:
        return {"key": _text(f"{self.name}:"), "range_end": _text(f"{self.name};")}

    def read(self, **how: object) -> Body:
        return {"request_range": {**self.bounds, **how}}

    def delete(self) -> Body:
        return {"request_delete_range": self.bounds}

    def guards(self, items: list[Body]) -> list[Body]:
        """Return the conditions that the range has not changed since ``items`` were read."""
        last = int(items[-1]["mod_revision"]) if items else 0
        newer = {"target": "MOD", "result": "LESS", "mod_revision": str(last + 1)}
        return [{**self.bounds, **newer}, *map(_unchanged, items[:1])]


class EtcdStore(Store):
    """A store under a prefix of an existing etcd, version 3.4 or later.

    Args:
        url: ``etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/PREFIX[?lease=ID]``, with members of
            the cluster, of which the first that answers is used. With ``lease``, keys end with
            that lease; without it they stay until they are deleted.
        timeout: The limit of every wait, seconds or a timedelta.
        tls: The TLS configuration; default: from the environment. Without it, HTTP.

    Nothing is sent before the first call. Calls raise DistStoreError if no member answers
    (StoreSilentError if all are silent), or if etcd refuses a request, such as a value above its
    ``--max-request-bytes`` (1.5 MiB by default). Raises ValueError for a malformed URL.
    """

    def __init__(
        self,
        url: str,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
        *,
        tls: Tls | EllipsisType | None = ...,
    ) -> None:
        super().__init__(timeout)
        self._address = EtcdAddress.parse(url)
        self._tls = tls_from_environment() if isinstance(tls, EllipsisType) else tls
        self._grace: float | None = None
        self._marks: list[str] = []
        self._follows: dict[bytes, tuple[int, Body, int]] = {}
        self._client = EtcdClient(self._address, self._tls)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of the first member."""
        return self._address.members[0]

    @property
    def url(self) -> str:
        """The URL of the keys for other processes, including the password."""
        return self._address.url

    def with_grace(self, seconds: float) -> EtcdStore:
        other = copy(self)
        other._grace = seconds
        return other

    def clone(self) -> EtcdStore:
        """Return another client of the same keys. Raises DistStoreError if this one is closed."""
        return self._at(self._address)

    def leased(self, lease: int, part: str = "") -> EtcdStore:
        """Return a client of the keys under ``part`` of this prefix, with ``lease``."""
        return self._at(self._address.leased(lease, part))

    def close(self) -> None:
        """End the connections and current waits. Keys stay until their lease ends."""
        self._client.close()

    def describe(self) -> str:
        return self._client.name

    # The lease.

    def grant(self, seconds: float) -> int:
        """Return the number of a new lease, which ends unless it is renewed within ``seconds``."""
        wish = {"TTL": str(max(1, round(seconds)))}
        return int(self._call("a new lease", "lease/grant", wish)["ID"])

    def renew(self) -> None:
        """Renew the lease of this store's keys. Raises DistStoreError if it has ended."""
        what, lease = f"renewing lease {self._address.lease}", str(self._address.lease)
        answer = self._call(what, "lease/keepalive", {"ID": lease})
        if not int(answer.get("result", {}).get("TTL", 0)):
            raise DistStoreError(f"{self.describe()}: the lease has ended, and with it all keys")

    def revoke(self) -> None:
        """End the lease of this store's keys, and with it the keys."""
        what, lease = f"revoking lease {self._address.lease}", str(self._address.lease)
        self._call(what, "lease/revoke", {"ID": lease})

    # Commands.

    def _request(self, op: Op, fields: Fields) -> Fields:
        match op:
            case Op.SET | Op.MULTI_SET:
                return self._set(fields)
            case Op.APPEND | Op.PUSH:
                return self._add_item(self._range(op, fields[0]), *fields)
            case Op.TRY_POP:
                return self._pop(fields[0])[0] or ()
            case Op.QUEUE_LEN:
                count = self._range(op, fields[0]).read(count_only=True)
                (answer,), _ = self._read(fields, count)
                return (b"%d" % int(answer.get("count", 0)),)
            case Op.CHECK:
                self._load(table := StoreTable(), fields, whole=True, keys_only=True)
                return (b"%d" % (not table.missing(fields)),)
            case Op.LIST_KEYS:
                return self._list()
            case Op.NUM_KEYS:
                return (b"%d" % len(self._list()),)
            case _:
                return self._change(op, fields)

    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        deadline = Deadline.after(self._seconds(timeout))
        earlier_end = list(self._last_end)

        def ended() -> bool:
            return bool(self._ends) or self._last_end != earlier_end

        table, waiter = Commands().waiter(op, fields, _ignore)
        looked = False
        while True:
            last = deadline.expired or ended()
            if op in (Op.POP, Op.TAIL):
                answer, revision = self._pop(*fields) if op == Op.POP else self._tail(*fields)
            else:
                missing, names_only = waiter.missing(table), op == Op.WAIT
                revision = self._load(table, missing, whole=last, keys_only=names_only)
                answer = waiter.values if waiter.advance(table) is None else None
                if answer is not None and looked:
                    # A key that was read earlier may have been deleted since: read all at once.
                    table, waiter = Commands().waiter(op, fields, _ignore)
                    looked = False
                    continue
                looked = True
            if answer is not None:
                return answer
            missing = waiter.missing(table)
            if last:
                raise self._wait_error(op, missing, deadline)
            look = Deadline.after(min(deadline.remaining(), _WATCH_SECONDS))
            self._client.watch(self._range(op, missing[0]).bounds, revision + 1, look, ended)

    def _load(
        self, table: StoreTable, keys: Fields, *, whole: bool = False, keys_only: bool = False
    ) -> int:
        """Read ``keys`` into ``table``, without ``whole`` only until one is missing. Return a
        revision: later changes may not have been read.
        """
        revision = 0
        for first in range(0, len(keys), _KEYS_A_REQUEST):
            part = keys[first : first + _KEYS_A_REQUEST]
            ranges = [self._range(Op.GET, key).read(keys_only=keys_only) for key in part]
            answers, at = self._read(part, *ranges)
            revision = revision or at
            for key, answer in zip(part, answers, strict=True):
                if items := _in_order(answer):
                    table.set(key, _joined(items))
            if not whole and table.missing(part):
                return at
        return revision

    def _set(self, fields: Fields) -> Fields:
        pairs = list(dict(zip(fields[::2], fields[1::2], strict=True)).items())
        for first in range(0, len(pairs), _KEYS_A_REQUEST):
            operations: list[Body] = []
            for key, value in pairs[first : first + _KEYS_A_REQUEST]:
                operations += self._replacement(key, value)
            self._call(f"setting {_names(fields[::2])}", "kv/txn", {"success": operations})
        return ()

    def _add_item(self, where: _Range, key: bytes, value: bytes) -> Fields:
        """Append an item to ``where``, once, even if the request is sent several times."""
        item = _text(f"{where.name}:{os.urandom(8).hex()}")
        new = {"key": item, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        request = {"compare": [new], "success": [self._put(item, value)]}
        self._call(f"appending to {_names([key])}", "kv/txn", request)
        return ()

    def _change(self, op: Op, fields: Fields) -> Fields:
        """Execute a command on one key atomically."""
        key, where = fields[0], self._range(op, fields[0])
        while True:
            (answer,), _ = self._read([key], where.read())
            commands, items = Commands(), _in_order(answer)
            if items:
                commands.table.set(key, _joined(items))
            changes = commands.table.changes
            result = commands.answer(op, fields)
            assert result is not None, op
            if commands.table.changes == changes:
                return result
            value = commands.table.get(key)
            then = [where.delete()] if value is None else self._replacement(key, value)
            if self._commit(f"changing {_names([key])}", where.guards(items), then):
                return result

    def _pop(self, key: bytes) -> tuple[Fields | None, int]:
        """Remove and return the first value of a queue (None if empty), and the revision."""
        how = {"sort_order": "ASCEND", "sort_target": "CREATE", "limit": "1"}
        while True:
            (answer,), revision = self._read([key], self._range(Op.POP, key).read(**how))
            items = _in_order(answer)
            if not items:
                return None, revision
            taken = {"request_delete_range": {"key": items[0]["key"]}}
            if self._commit(f"taking from {_names([key])}", [_unchanged(items[0])], [taken]):
                return (_joined(items),), revision

    def _tail(self, key: bytes, offset: bytes) -> tuple[Fields | None, int]:
        number, where = unpack_number(offset), self._range(Op.TAIL, key)
        known, first, last = self._follows.get(key, (-1, {}, 0))
        request: Body = {"success": [where.read()]}
        if known == number:  # read only new pieces, unless the key was set or deleted since
            new = where.read(min_mod_revision=str(last + 1))
            request = {"compare": [_unchanged(first)], "success": [new], "failure": [where.read()]}
        answer = self._call(f"following {_names([key])}", "kv/txn", request)
        items = _in_order(answer["responses"][0]["response_range"])
        value = _joined(items)
        if known != number or not answer.get("succeeded"):
            first, value = (items or [{}])[0], value[number:]
        if value:
            self._follows[key] = number + len(value), first, int(items[-1]["mod_revision"])
        return (value,) if value else None, int(answer["header"]["revision"])

    def _list(self) -> Fields:
        begin, end = (f"{self._address.prefix}/v{mark}" for mark in "/0")
        bounds = {"key": _text(begin), "range_end": _text(end), "keys_only": True}
        (answer,), _ = self._read([], {"request_range": bounds})
        keys = (b64decode(item["key"])[len(begin.encode()) :] for item in _in_order(answer))
        return sorted({unquote_to_bytes(key.partition(b":")[0]) for key in keys})

    # Requests.

    def _commit(self, what: str, guards: list[Body], operations: list[Body]) -> bool:
        """Execute ``operations`` if the ``guards`` hold; return whether they were executed."""
        try:
            mark = self._marks.pop()
        except IndexError:  # no free mark; there are at most as many as threads
            mark = f"{self._address.prefix}/m/{os.urandom(8).hex()}"
        place, token = _text(mark), os.urandom(8)
        request = {
            "compare": guards,
            "success": [*operations, self._put(place, token)],
            "failure": [{"request_range": {"key": place}}],
        }
        answer = self._call(what, "kv/txn", request)
        self._marks.append(mark)
        if answer.get("succeeded"):
            return True
        if _joined(_in_order(answer["responses"][0]["response_range"])) == token:
            return True
        # Another client's change came first. Back off.
        time.sleep(next_slice(random.uniform(0, _RETRY_SECONDS)))  # noqa: S311 (no secret)
        return False

    def _read(self, keys: Iterable[bytes], *ranges: Body) -> tuple[list[Body], int]:
        """Return etcd's answers to ``ranges``, and their common revision."""
        what = f"reading {_names(keys) or 'the names of keys'}"
        answer = self._call(what, "kv/txn", {"success": ranges})
        answers = [one["response_range"] for one in answer.get("responses", ())]
        return answers, int(answer["header"]["revision"])

    def _call(self, what: str, path: str, body: Body) -> Body:
        limit = min(self._timeout, _OUTAGE_SECONDS) if self._grace is None else self._grace
        return self._client.call(what, path, body, Deadline.after(limit))

    def _replacement(self, key: bytes, value: bytes) -> list[Body]:
        """Return the operations that set ``key`` and delete its appended pieces."""
        where = self._range(Op.SET, key)
        pieces = {**where.bounds, "key": _text(f"{where.name}:\0")}
        return [self._put(where.bounds["key"], value), {"request_delete_range": pieces}]

    def _put(self, key: str, value: bytes) -> Body:
        lease = {"lease": str(self._address.lease)} if self._address.lease else {}
        return {"request_put": {"key": key, "value": b64encode(value).decode(), **lease}}

    def _range(self, op: Op, key: bytes) -> _Range:
        kind = "q" if op in (Op.PUSH, Op.POP, Op.QUEUE_LEN) else "v"
        return _Range(f"{self._address.prefix}/{kind}/{quote_from_bytes(key)}")

    def _at(self, address: EtcdAddress) -> EtcdStore:
        self._client.check_open()
        return EtcdStore(address.url, self._timeout, tls=self._tls)


def _text(key: str) -> str:
    """Return a key encoded for etcd's JSON."""
    return b64encode(key.encode("utf-8", "surrogateescape")).decode()


def _in_order(answer: Body) -> list[Body]:
    return sorted(answer.get("kvs", ()), key=lambda item: int(item["mod_revision"]))


def _joined(items: list[Body]) -> bytes:
    return b"".join(b64decode(item.get("value", "")) for item in items)


def _unchanged(item: Body) -> Body:
    revision = item["mod_revision"]
    return {"key": item["key"], "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def _names(keys: Iterable[bytes]) -> str:
    names = [repr(key_name(key)) for key in keys]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _ignore(_waiter: Waiter) -> None:
    """Do nothing: this store polls its waiters itself."""
