"""Gather into one array: the destination gets the concatenated arrays of all members.

The module functions of the same names copy these docstrings.
"""

# A call without async_op matches the first two overloads of a method; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from meshlib._arrays import adapter as arrays
from meshlib._arrays.checks import (
    check_dtype,
    check_no_overlap,
    check_same_dtype,
    check_size,
    same_start,
    split_evenly,
)
from meshlib._calls.spec import CallSpec
from meshlib._calls.work import Work
from meshlib._collectives.group_of_ranks import GroupOfRanks, resolve_rank, spec_of
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._waiting.deadline import Timeout

A = TypeVar("A")


class GatherSingle(GroupOfRanks):
    """The gather of a group of ranks into one array."""

    @overload
    def gather_single(
        self,
        tensor: A,
        gather_tensor: A | None = ...,
        dst: int | None = ...,
        async_op: Literal[False] = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> A | None: ...

    @overload
    def gather_single(
        self,
        tensor: A,
        gather_tensor: A | None = ...,
        dst: int | None = ...,
        async_op: Literal[True] = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A | None]: ...

    @overload
    def gather_single(
        self,
        tensor: A,
        gather_tensor: A | None = ...,
        dst: int | None = ...,
        async_op: bool = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A | None] | None: ...

    def gather_single(
        self,
        tensor: Any,
        gather_tensor: Any = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Gather the members' ``tensor`` into one array of one member.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Size and dtype are the same on every member.
            gather_tensor: On the destination an array of that dtype with ``size()`` times the
                elements: the members' arrays concatenated or stacked. None elsewhere.
            dst: The global rank of the destination; by default that of group rank 0.
            async_op: Return a ``Work`` at once instead of the result.
            group_dst: The destination's rank in the group, instead of ``dst``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            On the destination ``gather_tensor``, or a new array if it is read-only (JAX); None
            elsewhere. With ``async_op``, a ``Work`` with that result. None on a rank outside the
            group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        arguments = tensor, gather_tensor, dst, group_dst
        return self._issue(Kind.GATHER, self._prepare_gather_single, arguments, async_op, timeout)

    def _prepare_gather_single(
        self, tensor: Any, gather_tensor: Any, dst: int | None, group_dst: int | None
    ) -> CallSpec:
        call_queue = self._call_queue
        root, size = resolve_rank(self, dst, group_dst, "dst", default=0), len(call_queue.ranks)
        x = arrays.source(tensor, "tensor")
        code = check_dtype(x, "tensor")
        out = flats = None
        if root == call_queue.rank:
            given = self._required(gather_tensor, "gather_tensor", "destination")
            out = arrays.target(given, "gather_tensor")
            check_same_dtype(out, "gather_tensor", x, "tensor")
            why = f"{size} members times the size of tensor"
            check_size(out, "gather_tensor", size * x.flat.size, why)
            flats = split_evenly(out.flat, size)
            if not same_start(x.flat, flats[root]):
                check_no_overlap(out, "gather_tensor", x, "tensor")
        elif gather_tensor is not None:
            raise ValueError(
                f"gather_tensor was given on rank {call_queue.ranks[call_queue.rank]}, which is not"
                f" the destination, {call_queue.ranks[root]}; expected None"
            )

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.gather(call, flats, x.flat, root)
            return None if out is None else out.finish()

        return spec_of(Kind.GATHER, run, x, code, elements=x.flat.size, root=root)

    gather_into_tensor = gather_single
