"""all_gather and reduce_scatter, with a list of arrays or one array for the members' parts.

The module functions of the same names copy these docstrings.
"""

# A call without async_op matches the first two overloads of a method; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

from meshlib._arrays import adapter as arrays
from meshlib._arrays.adapted import AdaptedArray, ListOf
from meshlib._arrays.checks import (
    adapt_sources,
    adapt_targets,
    check_dtype,
    check_no_overlap,
    check_reduction,
    check_same_dtype,
    check_size,
    same_start,
    split_evenly,
)
from meshlib._calls.spec import CallSpec, Overlapping
from meshlib._calls.work import Work
from meshlib._collectives.group_of_ranks import ARRAYS, LISTS, GroupOfRanks, spec_of
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._operands.reduce_op import Flat, ReduceOp
from transport._waiting.deadline import Timeout

A = TypeVar("A")

# Looking up a member of an enumeration takes time in each call.
_ALL_GATHER, _REDUCE_SCATTER = Kind.ALL_GATHER, Kind.REDUCE_SCATTER


class GatheringCollectives(GroupOfRanks):
    """The all_gathers and reduce_scatters of one group of ranks."""

    @overload
    def all_gather(
        self,
        tensor_list: ListOf[A],
        tensor: Any,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> list[A]: ...

    @overload
    def all_gather(
        self,
        tensor_list: ListOf[A],
        tensor: Any,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[list[A]]: ...

    @overload
    def all_gather(
        self,
        tensor_list: ListOf[A],
        tensor: Any,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> list[A] | Work[list[A]]: ...

    def all_gather(
        self,
        tensor_list: ListOf[Any],
        tensor: Any,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Gather member i's ``tensor`` into ``tensor_list[i]`` on all members.

        Args:
            tensor_list: One array for each member, in group order, with the size of that member's
                ``tensor`` and its dtype. The arrays do not overlap; ``tensor_list[rank]`` may be
                ``tensor``.
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Its size may differ by member.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The list of gathered arrays. With ``async_op``, a ``Work`` with that result. None on a
            rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _ALL_GATHER,
            partial(self._prepare_all_gather, async_op=True)
            if async_op
            else self._prepare_all_gather,
            (tensor_list, tensor),
            async_op,
            timeout,
            LISTS,
        )

    def _prepare_all_gather(
        self, tensor_list: ListOf[Any], tensor: Any, async_op: bool = False
    ) -> CallSpec:
        call_queue = self._call_queue
        x = arrays.source(tensor, "tensor")
        code = check_dtype(x, "tensor")
        outs = adapt_targets(tensor_list, "tensor_list", len(call_queue.ranks))
        mine = outs[call_queue.rank]
        check_size(mine, f"tensor_list[{call_queue.rank}]", x.flat.size, "the size of tensor")
        for i, out in enumerate(outs):
            check_same_dtype(out, f"tensor_list[{i}]", x, "tensor")
            if i != call_queue.rank or not same_start(out.flat, x.flat):
                check_no_overlap(out, f"tensor_list[{i}]", x, "tensor")

        def finish() -> list[Any]:
            return [out.finish() for out in outs]

        flats = [out.flat for out in outs]
        return _all_gather(x, code, flats, outs, finish, async_op)

    @overload
    def all_gather_into_tensor(
        self,
        output_tensor: A,
        input_tensor: Any,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def all_gather_into_tensor(
        self,
        output_tensor: A,
        input_tensor: Any,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def all_gather_into_tensor(
        self,
        output_tensor: A,
        input_tensor: Any,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def all_gather_into_tensor(
        self,
        output_tensor: Any,
        input_tensor: Any,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Gather the members' ``input_tensor`` into one ``output_tensor`` on all members.

        Args:
            output_tensor: An array of ``input_tensor``'s dtype with ``size()`` times its elements:
                the members' arrays, concatenated along dim 0 or stacked in a new first dim.
            input_tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype,
                bool, or one of ml_dtypes' floats. Size and dtype are the same on every member. May
                be this member's part of ``output_tensor``.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            ``output_tensor``, or a new array if it is read-only (JAX). With ``async_op``, a
            ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _ALL_GATHER,
            partial(self._prepare_all_gather_into, async_op=True)
            if async_op
            else self._prepare_all_gather_into,
            (output_tensor, input_tensor),
            async_op,
            timeout,
            ARRAYS,
        )

    def _prepare_all_gather_into(
        self, output_tensor: Any, input_tensor: Any, async_op: bool = False
    ) -> CallSpec:
        call_queue = self._call_queue
        x = arrays.source(input_tensor, "input_tensor")
        code = check_dtype(x, "input_tensor")
        out = arrays.target(output_tensor, "output_tensor")
        size = len(call_queue.ranks)
        check_same_dtype(out, "output_tensor", x, "input_tensor")
        check_size(out, "output_tensor", size * x.flat.size, f"{size} times input_tensor's size")
        flats = split_evenly(out.flat, size)
        if not same_start(x.flat, flats[call_queue.rank]):
            check_no_overlap(out, "output_tensor", x, "input_tensor")
        return _all_gather(x, code, flats, [out], out.finish, async_op)

    @overload
    def reduce_scatter(
        self,
        output: A,
        input_list: ListOf[Any],
        op: ReduceOp = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def reduce_scatter(
        self,
        output: A,
        input_list: ListOf[Any],
        op: ReduceOp = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def reduce_scatter(
        self,
        output: A,
        input_list: ListOf[Any],
        op: ReduceOp = ...,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def reduce_scatter(
        self,
        output: Any,
        input_list: ListOf[Any],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Reduce the members' ``input_list[i]`` with ``op`` into member i's ``output``.

        Args:
            output: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. It has the size of ``input_list[rank]``. It may be that
                array, but overlaps no other input.
            input_list: One array of ``output``'s dtype for each member, in group order. Sizes may
                differ within the list, but not between members.
            op: A ``ReduceOp`` that supports the dtype.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            ``output``, or a new array if it is read-only (JAX). With ``async_op``, a ``Work`` with
            that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _REDUCE_SCATTER,
            self._prepare_reduce_scatter,
            (output, input_list, op),
            async_op,
            timeout,
            LISTS,
        )

    def _prepare_reduce_scatter(
        self, output: Any, input_list: ListOf[Any], op: ReduceOp
    ) -> CallSpec:
        call_queue = self._call_queue
        out = arrays.target(output, "output")
        ins = adapt_sources(input_list, "input_list", len(call_queue.ranks))
        op, code = check_reduction(op, out, "output")
        check_size(
            out,
            "output",
            ins[call_queue.rank].flat.size,
            f"the size of input_list[{call_queue.rank}]",
        )
        for i, x in enumerate(ins):
            check_same_dtype(x, f"input_list[{i}]", out, "output")
            if i != call_queue.rank or not same_start(out.flat, x.flat):
                check_no_overlap(out, "output", x, f"input_list[{i}]")
        return _reduce_scatter(out, [x.flat for x in ins], op, code)

    @overload
    def reduce_scatter_tensor(
        self,
        output: A,
        input: Any,
        op: ReduceOp = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def reduce_scatter_tensor(
        self,
        output: A,
        input: Any,
        op: ReduceOp = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def reduce_scatter_tensor(
        self,
        output: A,
        input: Any,
        op: ReduceOp = ...,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Reduce the members' ``input`` with ``op``; part i goes into member i's ``output``.

        Args:
            output: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Size and dtype are the same on every member. May be this
                member's part of ``input``.
            input: An array of the dtype of ``output``, with ``size()`` times its elements. The
                parts are concatenated along dim 0 or stacked in a new first dim.
            op: A ``ReduceOp`` that supports the dtype.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            ``output``, or a new array if it is read-only (JAX). With ``async_op``, a ``Work`` with
            that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _REDUCE_SCATTER,
            self._prepare_reduce_scatter_tensor,
            (output, input, op),
            async_op,
            timeout,
            ARRAYS,
        )

    def _prepare_reduce_scatter_tensor(self, output: Any, input: Any, op: ReduceOp) -> CallSpec:
        call_queue = self._call_queue
        out = arrays.target(output, "output")
        x = arrays.source(input, "input")
        op, code = check_reduction(op, out, "output")
        size = len(call_queue.ranks)
        check_same_dtype(x, "input", out, "output")
        check_size(x, "input", size * out.flat.size, f"{size} times the size of output")
        flats = split_evenly(x.flat, size)
        if not same_start(out.flat, flats[call_queue.rank]):
            check_no_overlap(out, "output", x, "input")
        return _reduce_scatter(out, flats, op, code)

    # Since PyTorch 2.14, c10d also has these names.
    all_gather_single = all_gather_into_tensor
    reduce_scatter_single = reduce_scatter_tensor


def _all_gather(
    x: AdaptedArray,
    code: int,
    flats: list[Flat],
    outs: Sequence[AdaptedArray],
    finish: Callable[[], Any],
    async_op: bool,
) -> CallSpec:
    """Gather the members' ``x`` into ``flats``, the memory of ``outs``; return ``finish()``."""

    def gather(communicator: Communicator, call: Call) -> None:
        communicator.all_gather(call, flats, x.flat)

    def run(communicator: Communicator, call: Call) -> Any:
        communicator.all_gather(call, flats, x.flat)
        return finish()

    overlaps = async_op and not any(out.writes_back for out in outs)
    how = Overlapping(gather, (*flats, x.flat), finish) if overlaps else run
    elements = sum(flat.size for flat in flats)
    return spec_of(_ALL_GATHER, how, x, code, elements=elements)


def _reduce_scatter(out: AdaptedArray, flats: list[Flat], op: ReduceOp, code: int) -> CallSpec:
    """Reduce the members' ``flats``; put this member's part into ``out``."""

    def run(communicator: Communicator, call: Call) -> Any:
        communicator.reduce_scatter(call, out.flat, flats, op)
        return out.finish()

    elements = sum(flat.size for flat in flats)
    return spec_of(_REDUCE_SCATTER, run, out, code, elements=elements, op=op.code)
