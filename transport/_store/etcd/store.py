"""A store whose keys are in an etcd, where they outlive every process of the job.

A key is a range of etcd's: its value as it was set (``PREFIX/v/KEY:``), then the appended pieces.
Each piece has a name of its own; their order is that of their revisions. So appending to a log is
one write, and its follower gets the new pieces alone. A queue is a range of values.

A change that depends on what is there is a transaction, guarded by the revisions that were read. It
leaves a mark, by which a request that is sent again, because its answer was lost, knows that it has
been carried out.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING
from urllib.parse import quote_from_bytes, unquote_to_bytes

from transport._deadline import Deadline, Timeout
from transport._errors import DistError, DistStoreError
from transport._interrupts import next_slice
from transport._net.tls_choice import tls_from_environment
from transport._store.arguments import key_name
from transport._store.base import DEFAULT_STORE_TIMEOUT, Store
from transport._store.commands import Fields, Op
from transport._store.etcd.address import EtcdAddress
from transport._store.etcd.client import Body, EtcdClient
from transport._store.fields import unpack_number

if TYPE_CHECKING:
    from transport._net.tls import Tls

_OUTAGE_SECONDS = 30.0
"""How long a request goes on trying while no member answers, if its own time is longer."""
_LOOK_SECONDS = 10.0
"""How long a watch may be silent before the key is read again: its member may have died."""
_RETRY_SECONDS = 0.02
_KEYS_A_REQUEST = 50
"""etcd allows 128 operations in a transaction; setting a key takes two."""

Change = tuple[list[Body] | None, Fields]
"""What is to be done, None for nothing, and the answer to the caller then."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The keys of etcd's from ``begin`` to before ``end``."""

    begin: str
    end: str

    @classmethod
    def of(cls, name: str) -> _Range:
        return cls(_text(f"{name}:"), _text(f"{name};"))

    def read(self, **how: object) -> Body:
        return {"request_range": {"key": self.begin, "range_end": self.end, **how}}

    def delete(self) -> Body:
        return {"request_delete_range": {"key": self.begin, "range_end": self.end}}


@dataclass(frozen=True, slots=True)
class _Held:
    """What etcd has of one key: the value, the items that it consists of, in order."""

    range: _Range
    items: list[Body]

    @property
    def value(self) -> bytes | None:
        return b"".join(map(_value, self.items)) if self.items else None

    @property
    def last(self) -> int:
        return _revision(self.items[-1]) if self.items else 0

    def guards(self) -> list[Body]:
        """Return the conditions under which nothing has changed since."""
        newer = {
            "key": self.range.begin,
            "range_end": self.range.end,
            "target": "MOD",
            "result": "LESS",
            "mod_revision": str(self.last + 1),
        }
        return [newer, *(_unchanged(item) for item in self.items[:1])]


class EtcdStore(Store):
    """A store under a prefix of an existing etcd, version 3.4 or later.

    Args:
        url: ``etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/PREFIX[?lease=ID]``: the members of
            the cluster, of which the first that answers is used. With ``lease``, keys go when that
            lease ends; without it they stay until they are deleted.
        timeout: The limit of every wait, seconds or a timedelta.
        tls: The TLS configuration; default: from the environment. Without it, HTTP.

    Nothing is sent before the first call. Calls raise DistStoreError when no member answers
    (StoreSilentError if all are silent), and when etcd refuses a request, such as a value above its
    ``--max-request-bytes`` (1.5 MiB by default). Raises ValueError for a wrong URL.
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
        self._patience: float | None = None
        self._marks: list[str] = []
        self._follows: dict[bytes, tuple[int, _Held]] = {}
        self._client = EtcdClient(self._address, self._tls)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of the first member."""
        return self._address.members[0]

    @property
    def url(self) -> str:
        """The URL by which other processes reach the same keys; it has the password."""
        return self._address.url

    def with_patience(self, seconds: float) -> EtcdStore:
        other = copy(self)
        other._patience = seconds
        return other

    def clone(self) -> EtcdStore:
        """Return another client of the same keys. Raises DistStoreError when this one is closed."""
        return self._at(self._address)

    def leased(self, lease: int, part: str = "") -> EtcdStore:
        """Return a client of the keys under ``part`` of this prefix, which get ``lease``."""
        return self._at(self._address.leased(lease, part))

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        super().end_waits(error, by)
        if error is not None:
            self._client.wake()

    def hang_up(self) -> None:
        self._client.close()

    def close(self) -> None:
        """End the connections and the waits under way. The keys stay, as long as their lease."""
        self._client.close()

    def describe(self) -> str:
        return self._client.name

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        client: EtcdClient | None = getattr(self, "_client", None)
        if client is not None and not client.closed and self._patience is None:
            client.close()

    # The lease.

    def grant(self, seconds: float) -> int:
        """Return the number of a new lease, which ends unless it is renewed within ``seconds``."""
        wish = {"TTL": str(max(1, round(seconds)))}
        return int(self._call("a new lease", "lease/grant", wish)["ID"])

    def renew(self) -> None:
        """Renew the lease of this store's keys. Raises DistStoreError when it has ended."""
        what = f"renewing lease {self._address.lease}"
        answer = self._call(what, "lease/keepalive", {"ID": str(self._address.lease)})
        if not int(answer.get("result", {}).get("TTL", 0)):
            raise DistStoreError(f"{self.describe()}: its lease has ended, and with it all keys")

    def revoke(self) -> None:
        """End the lease of this store's keys, and with it the keys."""
        what = f"revoking lease {self._address.lease}"
        self._call(what, "lease/revoke", {"ID": str(self._address.lease)})

    # Commands.

    def _ask(self, op: Op, fields: Fields) -> Fields:
        commands: dict[Op, Callable[..., Fields]] = {
            Op.SET: self._set,
            Op.MULTI_SET: self._set,
            Op.ADD: self._add,
            Op.APPEND: self._append,
            Op.CHECK: self._check,
            Op.COMPARE_SET: self._compare_set,
            Op.DELETE: self._delete,
            Op.NUM_KEYS: self._num_keys,
            Op.LIST_KEYS: self._list,
            Op.PUSH: self._push,
            Op.TRY_POP: self._try_pop,
            Op.QUEUE_LEN: self._queue_len,
        }
        return commands[op](*fields)

    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        deadline = Deadline.after(self._seconds(timeout))
        waited_before = 0
        while True:
            self._client.check_open()
            turn, ended = self._client.turn, bool(self._ends)
            answer, missing, revision = self._look(op, fields, waited_before)
            if answer is not None:
                return answer
            if deadline.expired or ended:
                raise self._waited_in_vain(op, self._missing(op, fields), deadline)
            if op not in (Op.POP, Op.TAIL):
                waited_before = list(fields).index(missing[0])
            name = self._queue(missing[0]) if op == Op.POP else self._name(missing[0])
            watched, look = _Range.of(name), min(deadline.remaining(), _LOOK_SECONDS)
            self._client.watch(watched.begin, watched.end, revision + 1, Deadline.after(look), turn)
            if turn != self._client.turn and deadline.remaining() > 0:
                self._client.check_open()
                raise self._waited_in_vain(op, self._missing(op, fields), deadline)

    def _missing(self, op: Op, fields: Fields) -> Fields:
        """Return the keys that a wait lacks, for a message."""
        if op == Op.POP:
            return fields
        if op == Op.TAIL:
            return fields[:1]
        return [key for key in fields if self._check(key) == (b"0",)]

    def _look(self, op: Op, fields: Fields, begin: int) -> tuple[Fields | None, Fields, int]:
        """Return the answer, else what is missing, and the revision at which it was.

        The keys before ``begin`` were there at the last look.
        """
        if op == Op.POP:
            found, revision = self._pop(*fields)
            return found or None, fields, revision
        if op == Op.TAIL:
            return self._tail(*fields)
        keys = list(fields)
        first, how = begin, {} if op != Op.WAIT else {"count_only": True}
        values: list[bytes] = []
        while first < len(keys):
            part = keys[first : first + _KEYS_A_REQUEST]
            answers, revision = self._read(part, **how)
            for key, answer in zip(part, answers, strict=True):
                if not int(answer.get("count", 0)):
                    return None, [key], revision
                values.append(_Held(_Range.of(""), _in_order(answer)).value or b"")
            first += len(part)
        if begin:  # one of the earlier keys may have been deleted since
            return self._look(op, fields, 0)
        return (values if op != Op.WAIT else ()), (), 0

    def _set(self, *fields: bytes) -> Fields:
        pairs = list(dict(zip(fields[::2], fields[1::2], strict=True)).items())
        for first in range(0, len(pairs), _KEYS_A_REQUEST):
            operations: list[Body] = []
            for key, value in pairs[first : first + _KEYS_A_REQUEST]:
                operations += self._replacement(key, value)
            self._call(f"setting {_names(fields[::2])}", "kv/txn", {"success": operations})
        return ()

    def _add(self, key: bytes, amount: bytes) -> Fields:
        def sum_up(held: _Held) -> Change:
            text = held.value or b"0"
            try:
                total = b"%d" % (int(text) + int(amount))
            except ValueError:
                raise DistStoreError(
                    f"key {key_name(key)!r} holds {text[:40]!r}, which is no number;"
                    " add needs a counter"
                ) from None
            return self._replacement(key, total), (total,)

        return self._change(key, sum_up)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Fields:
        def compare(held: _Held) -> Change:
            if held.value is None and expected:
                return None, (expected,)
            if held.value is None or held.value == expected:
                return self._replacement(key, desired), (desired,)
            return None, (held.value,)

        return self._change(key, compare)

    def _delete(self, key: bytes) -> Fields:
        def delete(held: _Held) -> Change:
            return ([held.range.delete()], (b"1",)) if held.items else (None, (b"0",))

        return self._change(key, delete)

    def _append(self, key: bytes, value: bytes) -> Fields:
        return self._add_item(f"appending to {key_name(key)!r}", self._name(key), value)

    def _push(self, key: bytes, value: bytes) -> Fields:
        return self._add_item(f"pushing to queue {key_name(key)!r}", self._queue(key), value)

    def _add_item(self, what: str, name: str, value: bytes) -> Fields:
        """Put an item behind all others of ``name``: once, however often the request is sent."""
        item = _text(f"{name}:{os.urandom(8).hex()}")
        new = {"key": item, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        self._call(what, "kv/txn", {"compare": [new], "success": [self._put(item, value)]})
        return ()

    def _pop(self, key: bytes) -> tuple[Fields, int]:
        """Return the first value of a queue, if it has one, and the revision."""
        what, queue = f"taking from queue {key_name(key)!r}", _Range.of(self._queue(key))
        oldest = queue.read(sort_order="ASCEND", sort_target="CREATE", limit="1")
        while True:
            answer = self._call(what, "kv/txn", {"success": [oldest]})
            items = _in_order(answer["responses"][0]["response_range"])
            if not items:
                return (), int(answer["header"]["revision"])
            taken = {"request_delete_range": {"key": items[0]["key"]}}
            if self._commit(what, [_unchanged(items[0])], [taken]):
                return (_value(items[0]),), 0
            self._pause()

    def _try_pop(self, key: bytes) -> Fields:
        return self._pop(key)[0]

    def _tail(self, key: bytes, offset: bytes) -> tuple[Fields | None, Fields, int]:
        number, what = unpack_number(offset), f"following {key_name(key)!r}"
        known, held = self._follows.get(key, (-1, _Held(_Range.of(self._name(key)), [])))
        request: Body = {"success": [held.range.read()]}
        if known == number:  # nothing but new pieces, unless the key was set or deleted since
            request = {
                "compare": [_unchanged(item) for item in held.items[:1]],
                "success": [held.range.read(min_mod_revision=str(held.last + 1))],
                "failure": [held.range.read()],
            }
        answer = self._call(what, "kv/txn", request)
        items = _in_order(answer["responses"][0]["response_range"])
        if known == number and answer.get("succeeded"):
            value, begin = b"".join(map(_value, items)), known
            items = [*held.items[:1], *(items[-1:] or held.items[1:])]
        else:
            value, begin = b"".join(map(_value, items))[number:], number
        if items and (value or known == number):
            # The first item and the last one are all that the next look needs.
            ends = [items[0], items[-1]]
            self._follows[key] = begin + len(value), _Held(held.range, ends)
        return ((value,) if value else None), (key,), int(answer["header"]["revision"])

    def _check(self, *keys: bytes) -> Fields:
        for first in range(0, len(keys), _KEYS_A_REQUEST):
            answers, _ = self._read(keys[first : first + _KEYS_A_REQUEST], count_only=True)
            if not all(int(answer.get("count", 0)) for answer in answers):
                return (b"0",)
        return (b"1",)

    def _queue_len(self, key: bytes) -> Fields:
        what = f"the length of queue {key_name(key)!r}"
        wish = {"success": [_Range.of(self._queue(key)).read(count_only=True)]}
        answer = self._call(what, "kv/txn", wish)["responses"][0]["response_range"]
        return (b"%d" % int(answer.get("count", 0)),)

    def _list(self) -> Fields:
        begin = f"{self._address.prefix}/v/"
        every = _Range(_text(begin), _text(f"{self._address.prefix}/v0")).read(keys_only=True)
        answer = self._call("listing the keys", "kv/txn", {"success": [every]})
        items = _in_order(answer["responses"][0]["response_range"])
        names = (b64decode(item["key"])[len(begin) :].partition(b":")[0] for item in items)
        return sorted({unquote_to_bytes(name) for name in names})

    def _num_keys(self) -> Fields:
        return (b"%d" % len(self._list()),)

    # Requests.

    def _change(self, key: bytes, decide: Callable[[_Held], Change]) -> Fields:
        """Carry out what ``decide`` says about the key, with nothing changed in between."""
        what, name = f"changing {key_name(key)!r}", _Range.of(self._name(key))
        while True:
            (answer,), _ = self._read([key])
            held = _Held(name, _in_order(answer))
            operations, result = decide(held)
            if operations is None or self._commit(what, held.guards(), operations):
                return result
            self._pause()

    def _commit(self, what: str, guards: list[Body], operations: list[Body]) -> bool:
        """Carry out ``operations`` if the ``guards`` hold; return whether that was done."""
        try:
            mark = self._marks.pop()
        except IndexError:  # as many marks as threads
            mark = f"{self._address.prefix}/m/{os.urandom(8).hex()}"
        token, place = os.urandom(8), _text(mark)
        request = {
            "compare": guards,
            "success": [*operations, self._put(place, token)],
            "failure": [{"request_range": {"key": place}}],
        }
        answer = self._call(what, "kv/txn", request)
        self._marks.append(mark)
        if answer.get("succeeded"):
            return True
        marks = _in_order(answer["responses"][0]["response_range"])
        return [_value(item) for item in marks] == [token]

    def _read(self, keys: Sequence[bytes], **how: object) -> tuple[list[Body], int]:
        """Return etcd's answers about ``keys``, and the revision of them all."""
        wish = {"success": [_Range.of(self._name(key)).read(**how) for key in keys]}
        answer = self._call(f"reading {_names(keys)}", "kv/txn", wish)
        ranges = [one["response_range"] for one in answer.get("responses", ())]
        return ranges, int(answer["header"]["revision"])

    def _call(self, what: str, path: str, body: Body) -> Body:
        limit = min(self._timeout, _OUTAGE_SECONDS) if self._patience is None else self._patience
        return self._client.call(what, path, body, Deadline.after(limit))

    def _replacement(self, key: bytes, value: bytes) -> list[Body]:
        """Return the operations that set ``key``: its pieces go."""
        whole = _Range.of(self._name(key))
        pieces = _Range(_text(f"{self._name(key)}:\0"), whole.end)
        return [self._put(whole.begin, value), pieces.delete()]

    def _put(self, key: str, value: bytes) -> Body:
        lease = {"lease": str(self._address.lease)} if self._address.lease else {}
        return {"request_put": {"key": key, "value": b64encode(value).decode(), **lease}}

    def _name(self, key: bytes) -> str:
        return f"{self._address.prefix}/v/{quote_from_bytes(key)}"

    def _queue(self, key: bytes) -> str:
        return f"{self._address.prefix}/q/{quote_from_bytes(key)}"

    def _at(self, address: EtcdAddress) -> EtcdStore:
        self._client.check_open()
        return EtcdStore(address.url, self._timeout, tls=self._tls)

    def _pause(self) -> None:
        """Let another client, whose change came first, get on."""
        self._client.check_open()
        time.sleep(next_slice(random.uniform(0, _RETRY_SECONDS)))  # noqa: S311 (no secret)


def _text(key: str) -> str:
    """Return a key as JSON has it."""
    return b64encode(key.encode("utf-8", "surrogateescape")).decode()


def _value(item: Body) -> bytes:
    return b64decode(item.get("value", ""))


def _revision(item: Body) -> int:
    return int(item["mod_revision"])


def _in_order(answer: Body) -> list[Body]:
    return sorted(answer.get("kvs", ()), key=_revision)


def _unchanged(item: Body) -> Body:
    revision = item["mod_revision"]
    return {"key": item["key"], "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def _names(keys: Iterable[bytes]) -> str:
    names = [repr(key_name(key)) for key in keys]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
