"""``Collectives``: all calls of a group of ranks.

``ProcessGroup`` and ``DeviceMesh`` inherit it, so each call is written once. Names, arguments and
meaning are c10d's. All calls update writable arrays in place and also return the result; for
immutable arrays (JAX) the returned array is the result. With ``async_op=True`` they return a
``Work`` whose ``result()`` is it. On a rank outside the group they return None.

All calls raise the same errors. TypeError and ValueError are for wrong arguments; they are raised
before any byte moves, and the group stays usable. ``CollectiveMismatchError`` means that members
made different calls, ``CollectiveTimeoutError`` that the deadline passed, ``RankFailedError`` that
a member is gone. These three break the group: later calls on it raise an error.
"""

# A call without async_op fits the first two overloads of a method: the first one counts.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from meshlib._calls.spec import CallSpec
from meshlib._calls.work import Work
from meshlib._collectives.coalesced import CoalescedCollectives
from meshlib._collectives.group_of_ranks import ARRAYS
from meshlib._collectives.on_objects import ObjectCollectives
from meshlib._collectives.symmetric import SymmetricMemory
from meshlib._collectives.windows.one_sided import OneSided
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._waiting.deadline import Timeout


def _meet(communicator: Communicator, call: Call) -> None:
    communicator.barrier(call)


# An enumeration looks its members up in Python, which takes a tenth of a microsecond.
_BARRIER = Kind.BARRIER
_BARRIER_SPEC = CallSpec(_BARRIER, _meet)
_MONITORED_BARRIER = CallSpec(Kind.MONITORED_BARRIER, _meet)


def _barrier() -> CallSpec:
    return _BARRIER_SPEC


class Collectives(ObjectCollectives, CoalescedCollectives, SymmetricMemory, OneSided):
    """The calls of one group of ranks: on arrays, on objects, point to point, barriers; memory.

    Arguments that several methods have mean the same in each:

    - arrays (``tensor``, ``output``, ``input`` …): NumPy, JAX or CuPy arrays, or objects with the
      buffer protocol, of any shape; NumPy's numeric dtypes, bool, and ml_dtypes' small floats;
    - ``op``: a ``ReduceOp``, SUM by default; TypeError where it has no meaning for the dtype;
    - ``src`` or ``dst``: a global rank; instead of it ``group_src`` or ``group_dst``: a rank in the
      group. ValueError for both, for neither if there is no default, and for a stranger;
    - ``tag``: a whole number from 0 to 2**32 - 1 that the two ends of a message agree on;
    - ``async_op``: return a ``Work`` at once, not the result;
    - ``timeout``: the call's deadline, seconds or a timedelta; else the dim's, the group's, the
      job's. ValueError for a negative one.

    Wrong arguments raise TypeError or ValueError before any byte moves, and the group stays usable.
    ``CollectiveMismatchError``, ``CollectiveTimeoutError`` and ``RankFailedError`` break it.
    """

    @overload
    def barrier(
        self,
        async_op: Literal[False] = ...,
        device_ids: Sequence[int] | None = ...,
        timeout: Timeout | None = ...,
    ) -> None: ...

    @overload
    def barrier(
        self,
        async_op: Literal[True] = ...,
        device_ids: Sequence[int] | None = ...,
        timeout: Timeout | None = ...,
    ) -> Work[None]: ...

    @overload
    def barrier(
        self,
        async_op: bool = ...,
        device_ids: Sequence[int] | None = ...,
        timeout: Timeout | None = ...,
    ) -> Work[None] | None: ...

    def barrier(
        self,
        async_op: bool = False,
        device_ids: Sequence[int] | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Return when every member has called.

        Args:
            async_op: Return a ``Work`` at once, not the result.
            device_ids: Accepted for compatibility with c10d.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            None; with ``async_op`` a ``Work``, except on a rank outside the group.

        Raises:
            TypeError, ValueError: For a wrong argument; nothing was sent. The group stays usable if
                no member can make the call; else the others raise CollectiveMismatchError.
            CollectiveMismatchError: On every member, if they make different calls.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(_BARRIER, _barrier, (), async_op, timeout, ARRAYS)

    def monitored_barrier(
        self, timeout: Timeout | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every member has called; past ``timeout`` name the missing ranks.

        Args:
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.
            wait_all_ranks: Accepted for compatibility with c10d: all missing ranks are named either
                way.

        Raises:
            TypeError, ValueError: For a wrong argument; nothing was sent. The group stays usable if
                no member can make the call; else the others raise CollectiveMismatchError.
            CollectiveMismatchError: On every member, if they make different calls.
            CollectiveTimeoutError: On every member, past the deadline; names all missing ranks,
                and the state of each rank.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        call_queue = self._call_queue
        if call_queue.rank >= 0:
            call_queue.issue(_MONITORED_BARRIER, timeout=timeout)
