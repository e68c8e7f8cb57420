"""Collectives on arrays, as methods of every kind of group of ranks.

Each method checks its arguments, adapts them to flat buffers, and issues a ``CallSpec``: the fields
that must be equal on every member, and the function to run. ``collectives`` documents what all
methods have in common. The module functions of the same names copy these docstrings.
"""

# A call without async_op matches the first two overloads of a method; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeVar, overload

from meshlib._arrays import adapter as arrays
from meshlib._arrays.checks import check_dtype, check_reduction
from meshlib._calls.spec import CallSpec, Overlapping
from meshlib._calls.work import Work
from meshlib._collectives.group_of_ranks import ARRAYS, GroupOfRanks, resolve_rank, spec_of
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._operands.reduce_op import RedOpType, ReduceOp
from transport._waiting.deadline import Timeout

A = TypeVar("A")

# Looking up a member of an enumeration takes time in each call.
_ALL_REDUCE, _BROADCAST, _REDUCE = Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE


class ArrayCollectives(GroupOfRanks):
    """The collectives on arrays."""

    @overload
    def all_reduce(
        self,
        tensor: A,
        op: ReduceOp = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def all_reduce(
        self,
        tensor: A,
        op: ReduceOp = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def all_reduce(
        self, tensor: A, op: ReduceOp = ..., async_op: bool = ..., timeout: Timeout | None = ...
    ) -> A | Work[A]: ...

    def all_reduce(
        self,
        tensor: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Reduce ``tensor`` over the members with ``op``; all members get the same bits.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
                with the result if writable.
            op: A ``ReduceOp`` that supports the dtype.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The result, in ``tensor``, or in a new array if ``tensor`` is read-only (JAX). With
            ``async_op``, a ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        prepare = _asynchronous_reduction if async_op else _all_reduction
        return self._issue(_ALL_REDUCE, prepare, (tensor, op), async_op, timeout, ARRAYS)

    @overload
    def scan(
        self,
        tensor: A,
        op: ReduceOp = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def scan(
        self,
        tensor: A,
        op: ReduceOp = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def scan(
        self,
        tensor: A,
        op: ReduceOp = ...,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def scan(
        self,
        tensor: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Reduce ``tensor`` over members 0 to this one with ``op``, as ``MPI_Scan`` does.

        Member i gets the same bits as from an ``all_reduce`` among the members 0 to i. A member
        sends at most twice the bytes of ``tensor``.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
                with the result if writable.
            op: A ``ReduceOp`` other than AVG that supports the dtype.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The result, in ``tensor``, or in a new array if ``tensor`` is read-only (JAX). With
            ``async_op``, a ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(Kind.SCAN, _scan, (tensor, op), async_op, timeout)

    @overload
    def exscan(
        self,
        tensor: A,
        op: ReduceOp = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def exscan(
        self,
        tensor: A,
        op: ReduceOp = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def exscan(
        self,
        tensor: A,
        op: ReduceOp = ...,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def exscan(
        self,
        tensor: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Reduce ``tensor`` over the members before this one with ``op``, as ``MPI_Exscan`` does.

        Member i gets the same bits as from an ``all_reduce`` among the members 0 to i - 1. Member 0
        gets the neutral element of ``op``: 0 for SUM, 1 for PRODUCT, the largest value for MIN. For
        example, ``exscan`` of the members' counts returns each member's offset in the
        concatenation.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
                with the result if writable.
            op: A ``ReduceOp`` other than AVG that supports the dtype.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The result, in ``tensor``, or in a new array if ``tensor`` is read-only (JAX). With
            ``async_op``, a ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(Kind.EXSCAN, _exscan, (tensor, op), async_op, timeout)

    @overload
    def broadcast(
        self,
        tensor: A,
        src: int | None = ...,
        async_op: Literal[False] = ...,
        group_src: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def broadcast(
        self,
        tensor: A,
        src: int | None = ...,
        async_op: Literal[True] = ...,
        group_src: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def broadcast(
        self,
        tensor: A,
        src: int | None = ...,
        async_op: bool = ...,
        group_src: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def broadcast(
        self,
        tensor: Any,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Copy one member's ``tensor`` to all members.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
                on all members but the source, if writable.
            src: The global rank of the source.
            async_op: Return a ``Work`` at once instead of the result.
            group_src: The source's rank in the group, instead of ``src``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The source's values, in ``tensor``, or in a new array if ``tensor`` is read-only (JAX).
            With ``async_op``, a ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _BROADCAST,
            self._prepare_broadcast,
            (tensor, src, group_src),
            async_op,
            timeout,
            ARRAYS,
        )

    def _prepare_broadcast(self, tensor: Any, src: int | None, group_src: int | None) -> CallSpec:
        call_queue = self._call_queue
        root = resolve_rank(self, src, group_src, "src")
        is_root = root == call_queue.rank
        x = arrays.source(tensor, "tensor") if is_root else arrays.target(tensor, "tensor")
        code = check_dtype(x, "tensor")

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.broadcast(call, x.flat, root)
            return x.finish()

        return spec_of(_BROADCAST, run, x, code, elements=x.flat.size, root=root)

    @overload
    def reduce(
        self,
        tensor: A,
        dst: int | None = ...,
        op: ReduceOp = ...,
        async_op: Literal[False] = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def reduce(
        self,
        tensor: A,
        dst: int | None = ...,
        op: ReduceOp = ...,
        async_op: Literal[True] = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def reduce(
        self,
        tensor: A,
        dst: int | None = ...,
        op: ReduceOp = ...,
        async_op: bool = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def reduce(
        self,
        tensor: Any,
        dst: int | None = None,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Reduce ``tensor`` over the members with ``op``, into one member's ``tensor``.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
                with the result on the destination, if writable; unchanged elsewhere.
            dst: The global rank of the destination.
            op: A ``ReduceOp`` that supports the dtype.
            async_op: Return a ``Work`` at once instead of the result.
            group_dst: The destination's rank in the group, instead of ``dst``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            On the destination the result, elsewhere the unchanged ``tensor``. With ``async_op``, a
            ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _REDUCE,
            self._prepare_reduce,
            (tensor, dst, op, group_dst),
            async_op,
            timeout,
            ARRAYS,
        )

    def _prepare_reduce(
        self, tensor: Any, dst: int | None, op: ReduceOp, group_dst: int | None
    ) -> CallSpec:
        call_queue = self._call_queue
        root = resolve_rank(self, dst, group_dst, "dst")
        is_root = root == call_queue.rank
        x = arrays.in_out(tensor, "tensor") if is_root else arrays.source(tensor, "tensor")
        op, code = check_reduction(op, x, "tensor")

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.reduce(call, x.flat, op, root)
            return x.finish()

        return spec_of(
            _REDUCE,
            run,
            x,
            code,
            elements=x.flat.size,
            op=op.code,
            root=root,
        )


def _prefix(kind: Kind, tensor: Any, op: ReduceOp) -> CallSpec:
    x = arrays.in_out(tensor, "tensor")
    op, code = check_reduction(op, x, "tensor")
    if op.kind is RedOpType.AVG:
        raise ValueError(f"op is {op}; expected one that scan supports, such as ReduceOp.SUM")

    def run(communicator: Communicator, call: Call) -> Any:
        communicator.scan(call, x.flat, op, kind is Kind.EXSCAN)
        return x.finish()

    return spec_of(kind, run, x, code, elements=x.flat.size, op=op.code)


_scan, _exscan = partial(_prefix, Kind.SCAN), partial(_prefix, Kind.EXSCAN)


def _all_reduction(tensor: Any, op: Any, async_op: bool = False) -> CallSpec:
    x = arrays.in_out(tensor, "tensor")
    op, code = check_reduction(op, x, "tensor", feedback=True)
    flat = x.flat

    def reduce(communicator: Communicator, call: Call) -> None:
        communicator.all_reduce(call, flat, op)

    def run(communicator: Communicator, call: Call) -> Any:
        communicator.all_reduce(call, flat, op)
        return x.finish()

    overlaps = async_op and not x.writes_back
    how = Overlapping(reduce, (flat,), x.finish) if overlaps else run
    return spec_of(_ALL_REDUCE, how, x, code, elements=flat.size, op=op.code)


_asynchronous_reduction = partial(_all_reduction, async_op=True)
