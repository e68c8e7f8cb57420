"""``Collectives``: all calls of a group of ranks.

``ProcessGroup`` and ``DeviceMesh`` inherit this class. Names, arguments and meanings are c10d's.
All calls update writable arrays in place and also return the result; immutable arrays (JAX) stay
unchanged. With ``async_op=True`` a call returns a ``Work`` whose ``result()`` is the result. On a
rank outside the group it returns None.

All calls raise the same errors. TypeError and ValueError mean invalid arguments; nothing was sent,
and the group stays usable. ``CollectiveMismatchError`` means that members made different calls,
``CollectiveTimeoutError`` that the deadline passed, ``RankFailedError`` that a member died or left.
These three break the group: later calls on it raise an error.
"""

# A call without async_op matches the first two overloads of a method; the first one applies.
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


# Looking up a member of an enumeration takes time in each call.
_BARRIER = Kind.BARRIER
_BARRIER_SPEC = CallSpec(_BARRIER, _meet)
_MONITORED_BARRIER = CallSpec(Kind.MONITORED_BARRIER, _meet)


def _barrier() -> CallSpec:
    return _BARRIER_SPEC


class Collectives(ObjectCollectives, CoalescedCollectives, SymmetricMemory, OneSided):
    """All calls of one group of ranks.

    Common arguments:

    - arrays (``tensor``, ``output``, ``input`` …): NumPy, JAX or CuPy arrays, or objects with the
      buffer protocol, of any shape; NumPy's numeric dtypes, bool, and ml_dtypes' small floats;
    - ``op``: a ``ReduceOp``, SUM by default; TypeError if the dtype does not support it;
    - ``src`` or ``dst``: a global rank, or instead ``group_src`` or ``group_dst``: a rank in the
      group. ValueError for both, for neither if there is no default, and for a rank outside the
      group;
    - ``tag``: an integer from 0 to 2**32 - 1, equal at both ends of a message;
    - ``async_op``: return a ``Work`` at once instead of the result;
    - ``timeout``: the call's deadline: seconds, a timedelta or "30s"; by default that of the mesh
      dim, the group or the job. ValueError if negative.

    Invalid arguments raise TypeError or ValueError before anything is sent; the group stays usable.
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
            async_op: Return a ``Work`` at once instead of the result.
            device_ids: Accepted for compatibility with c10d.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            None; with ``async_op`` a ``Work``, except on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if none are valid, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(_BARRIER, _barrier, (), async_op, timeout, ARRAYS)

    def monitored_barrier(
        self, timeout: Timeout | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every member has called; past ``timeout``, name the missing ranks.

        Args:
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.
            wait_all_ranks: Accepted for compatibility with c10d; the error always names all missing
                ranks.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if none are valid, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names all missing ranks,
                and the state of each rank.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        call_queue = self._call_queue
        if call_queue.rank >= 0:
            call_queue.issue(_MONITORED_BARRIER, timeout=timeout)
