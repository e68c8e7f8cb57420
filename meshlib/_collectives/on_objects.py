"""Collectives on Python objects, as pickles (protocol 5).

A pickle is never empty. With the backend "fake" the sender does not exist: the receiver gets no
bytes and leaves its list unchanged.

Unpickling can run any code. Pickles come only from members of the group, which have proved that
they know the job's secret. Do not use these calls between members that do not trust each other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshlib._arrays import pickling
from meshlib._arrays.checks import check_fillable, check_list, check_sequence
from meshlib._collectives.gather_single import GatherSingle
from meshlib._collectives.gathered import GatheringCollectives
from meshlib._collectives.group_of_ranks import NO_MEMBER, resolve_rank
from meshlib._collectives.on_arrays import ArrayCollectives
from meshlib._collectives.personalized import PersonalizedCollectives
from meshlib._collectives.point_to_point import PointToPoint
from transport._calls.header import Kind
from transport._operands.reduce_op import Flat
from transport._waiting.deadline import Deadline, Timeout, to_seconds

_COUNT = struct.Struct("<Q")

Left = Callable[[], float | None]
"""Returns the seconds left until a deadline of several calls; None for the group's deadline."""


def dumps(obj: Any, name: str) -> Flat:
    """Return ``obj`` as a flat array of bytes. Arrays inside are copied only once.

    Layout: the number of parts, the length of each (u64), the parts: the pickle, then its
    out-of-band buffers. Raises TypeError with ``name`` for an object that cannot be pickled.
    """
    try:
        payload = pickling.dump(obj)
    except Exception as error:
        raise TypeError(f"{name} cannot be pickled: {error}") from error
    parts = [memoryview(payload.data), *payload.buffers]
    head = b"".join(_COUNT.pack(n) for n in (len(parts), *(part.nbytes for part in parts)))
    return np.frombuffer(b"".join((head, *parts)), np.uint8)


def loads(data: Flat) -> Any:
    """Return the object from the bytes of ``dumps``. Arrays inside are views of ``data``."""
    view = data.data
    (count,) = _COUNT.unpack_from(view)
    lengths = [_COUNT.unpack_from(view, _COUNT.size * (i + 1))[0] for i in range(count)]
    start = _COUNT.size * (count + 1)
    parts: list[memoryview] = []
    for length in lengths:
        parts.append(view[start : start + length])
        start += length
    return pickling.load(parts[0], parts[1:])


def _share_timeout(timeout: Timeout | None) -> Left:
    """Return a function for the seconds left of ``timeout``, which several array calls share.

    Without ``timeout`` each call has the group's deadline.
    """
    return (lambda: None) if timeout is None else Deadline.after(to_seconds(timeout)).remaining


class ObjectCollectives(
    PointToPoint, ArrayCollectives, GatheringCollectives, GatherSingle, PersonalizedCollectives
):
    """The calls on objects. Each consists of calls on arrays of bytes.

    Objects are pickled; one that cannot be pickled raises TypeError before anything is sent.
    Unpickling can run any code; see ``meshlib._collectives.on_objects``. ``device`` is accepted for
    compatibility with c10d.
    """

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        device: Any = None,
        group_src: int | None = None,
        timeout: Timeout | None = None,
    ) -> list[Any]:
        """Replace the objects in ``object_list`` with those of one member's list.

        Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
        the job's secret can send a pickle.

        Args:
            object_list: A list, of the same length on every member.
            src: The global rank of the source; by default that of group rank 0.
            device: Accepted for compatibility with c10d.
            group_src: The source's rank in the group, instead of ``src``.
            timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
                of its array calls has the group's deadline.

        Returns:
            ``object_list``; None on a rank outside the group.

        Raises:
            TypeError: For an invalid argument or an object that cannot be pickled, before anything
                is sent.
            ValueError: For an invalid rank, and on a member whose list differs in length from the
                source's.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        call_queue = self._call_queue
        if call_queue.rank < 0:
            return NO_MEMBER

        def prepare() -> tuple[Left, int, Flat | None]:
            root = resolve_rank(self, src, group_src, "src", default=0)
            check_fillable(object_list, "object_list")
            mine = root == call_queue.rank
            data = dumps(list(object_list), "object_list") if mine else None
            return _share_timeout(timeout), root, data

        left, root, data = call_queue.checked(Kind.BROADCAST, prepare)
        mine = data is not None
        size = np.array([0 if data is None else data.size, len(object_list)], np.int64)
        self.broadcast(size, group_src=root, timeout=left())
        if data is None:
            data = np.empty(size[0], np.uint8)
        self.broadcast(data, group_src=root, timeout=left())
        if not mine and data.size:
            if size[1] != len(object_list):
                raise ValueError(
                    f"object_list has {len(object_list)} entries; the source's has {size[1]}"
                )
            object_list[:] = loads(data)
        return object_list

    def all_gather_object(
        self, object_list: list[Any], obj: Any, timeout: Timeout | None = None
    ) -> list[Any]:
        """Put member i's ``obj`` into ``object_list[i]`` on all members.

        Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
        the job's secret can send a pickle.

        Args:
            object_list: A list with ``size()`` entries; the call replaces them.
            obj: An object that can be pickled.
            timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
                of its array calls has the group's deadline.

        Returns:
            ``object_list``; None on a rank outside the group.

        Raises:
            TypeError: For an invalid argument or an object that cannot be pickled, before anything
                is sent.
            ValueError: For a list of the wrong length.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        call_queue = self._call_queue
        if call_queue.rank < 0:
            return NO_MEMBER

        def prepare() -> tuple[Left, Flat]:
            check_fillable(object_list, "object_list", len(call_queue.ranks))
            return _share_timeout(timeout), dumps(obj, "obj")

        left, data = call_queue.checked(Kind.ALL_GATHER, prepare)
        sizes = self._gather_sizes(data.size, left())
        parts = [np.empty(n, np.uint8) for n in sizes]
        self.all_gather(parts, data, timeout=left())
        object_list[:] = [loads(part) for part in parts]
        return object_list

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> list[Any] | None:
        """Put member i's ``obj`` into ``object_gather_list[i]`` of one member.

        Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
        the job's secret can send a pickle.

        Args:
            obj: An object that can be pickled.
            object_gather_list: On the destination, a list with ``size()`` entries, which the call
                replaces; None elsewhere.
            dst: The global rank of the destination; by default that of group rank 0.
            group_dst: The destination's rank in the group, instead of ``dst``.
            timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
                of its array calls has the group's deadline.

        Returns:
            ``object_gather_list`` on the destination, None elsewhere.

        Raises:
            TypeError: For an invalid argument or an object that cannot be pickled, before anything
                is sent.
            ValueError: For an invalid rank, a list of the wrong length, a missing list on the
                destination, or a list elsewhere.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        call_queue = self._call_queue
        if call_queue.rank < 0:
            return None

        def prepare() -> tuple[Left, int, Flat]:
            root = resolve_rank(self, dst, group_dst, "dst", default=0)
            if root == call_queue.rank:
                given = self._required(object_gather_list, "object_gather_list", "destination")
                check_fillable(given, "object_gather_list", len(call_queue.ranks))
            elif object_gather_list is not None:
                raise ValueError(
                    "object_gather_list was given on a rank that is not the destination:"
                    f" {call_queue.ranks[call_queue.rank]}, not {call_queue.ranks[root]}"
                )
            return _share_timeout(timeout), root, dumps(obj, "obj")

        left, root, data = call_queue.checked(Kind.GATHER, prepare)
        sizes = self._gather_sizes(data.size, left())
        if object_gather_list is None:
            self.gather(data, None, group_dst=root, timeout=left())
            return None
        parts = [np.empty(n, np.uint8) for n in sizes]
        self.gather(data, parts, group_dst=root, timeout=left())
        object_gather_list[:] = [loads(part) for part in parts]
        return object_gather_list

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: int | None = None,
        group_src: int | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Put entry i of one member's list into member i's ``scatter_object_output_list[0]``.

        Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
        the job's secret can send a pickle.

        Args:
            scatter_object_output_list: A list with at least one entry; the call replaces the first.
            scatter_object_input_list: On the source, one object for each member; ignored elsewhere.
            src: The global rank of the source; by default that of group rank 0.
            group_src: The source's rank in the group, instead of ``src``.
            timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
                of its array calls has the group's deadline.

        Returns:
            The object; None on a rank outside the group.

        Raises:
            TypeError: For an invalid argument or an object that cannot be pickled, before anything
                is sent.
            ValueError: For an invalid rank, an empty output list, or no input list on the source.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        call_queue = self._call_queue
        if call_queue.rank < 0:
            return None

        def prepare() -> tuple[Left, int, list[Flat] | None]:
            root = resolve_rank(self, src, group_src, "src", default=0)
            check_fillable(scatter_object_output_list, "scatter_object_output_list")
            if not scatter_object_output_list:
                raise ValueError("scatter_object_output_list is empty; expected one entry")
            pieces = None
            if root == call_queue.rank:
                name = "scatter_object_input_list"
                given = self._required(scatter_object_input_list, name, "source")
                check_list(given, name, len(call_queue.ranks))
                pieces = [dumps(entry, f"{name}[{i}]") for i, entry in enumerate(given)]
            return _share_timeout(timeout), root, pieces

        left, root, pieces = call_queue.checked(Kind.SCATTER, prepare)
        size = np.zeros(1, np.int64)
        sizes = None if pieces is None else [np.array([each.size], np.int64) for each in pieces]
        self.scatter(size, sizes, group_src=root, timeout=left())
        data = np.empty(size[0], np.uint8)
        self.scatter(data, pieces, group_src=root, timeout=left())
        if data.size:
            scatter_object_output_list[0] = loads(data)
        return scatter_object_output_list[0]

    def send_object_list(
        self,
        object_list: Sequence[Any],
        dst: int | None = None,
        device: Any = None,
        group_dst: int | None = None,
        tag: int = 0,
        timeout: Timeout | None = None,
    ) -> None:
        """Send the objects in ``object_list`` to one member.

        Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
        the job's secret can send a pickle.

        Args:
            object_list: Objects that can be pickled.
            dst: The global rank of the destination.
            device: Accepted for compatibility with c10d.
            group_dst: The destination's rank in the group, instead of ``dst``.
            tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
                arrive in order.
            timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
                of its array calls has the group's deadline.

        Raises:
            TypeError: For an invalid argument or an object that cannot be pickled, before anything
                is sent.
            ValueError: For an invalid rank or tag.
            CollectiveTimeoutError: Past the deadline; names the other end. It breaks the group.
            RankFailedError: If the other end dies or leaves.
        """
        call_queue = self._call_queue
        if call_queue.rank < 0:
            return
        left = _share_timeout(timeout)
        check_sequence(object_list, "object_list")
        data = dumps(list(object_list), "object_list")
        head = np.array([data.size, len(object_list)], np.int64)
        self.send(head, dst, tag, group_dst, timeout=left())
        self.send(data, dst, tag, group_dst, timeout=left())

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        device: Any = None,
        group_src: int | None = None,
        tag: int = 0,
        timeout: Timeout | None = None,
    ) -> int:
        """Replace the objects in ``object_list`` with the objects that one member sends.

        Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
        the job's secret can send a pickle.

        Args:
            object_list: A list as long as the sender's.
            src: The global rank of the source; any member if neither ``src`` nor ``group_src`` is
                given.
            device: Accepted for compatibility with c10d.
            group_src: The source's rank in the group, instead of ``src``.
            tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
                arrive in order.
            timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
                of its array calls has the group's deadline.

        Returns:
            The sender's global rank; -1 on a rank outside the group.

        Raises:
            TypeError: For an invalid argument.
            ValueError: For an invalid rank or tag, and if the sender's list has a different length;
                the sent objects are lost.
            CollectiveTimeoutError: Past the deadline; the group stays usable.
            RankFailedError: If the other end dies or leaves.
        """
        call_queue = self._call_queue
        if call_queue.rank < 0:
            return -1
        left = _share_timeout(timeout)
        check_fillable(object_list, "object_list")
        head = np.zeros(2, np.int64)
        sender = self.recv(head, src, tag, group_src, timeout=left())
        data = np.empty(head[0], np.uint8)
        self.recv(data, sender, tag, timeout=left())
        if data.size:
            if head[1] != len(object_list):
                raise ValueError(
                    f"object_list has {len(object_list)} entries; rank {sender} sent {head[1]}"
                )
            object_list[:] = loads(data)
        return sender

    def _gather_sizes(self, size: int, timeout: float | None) -> list[int]:
        sizes = np.empty(len(self._call_queue.ranks), np.int64)
        self.all_gather_into_tensor(sizes, np.array([size], np.int64), timeout=timeout)
        return sizes.tolist()
