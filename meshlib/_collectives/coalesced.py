"""Collectives on several arrays in one call, with one set of messages for all arrays."""

# A call without async_op matches the first two overloads of a method; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np

from meshlib._arrays.adapted import AdaptedArray, ListOf
from meshlib._arrays.checks import (
    adapt_sources,
    adapt_targets,
    check_disjoint,
    check_dtype,
    check_list,
    check_no_overlap,
    check_reduction,
    check_same_dtype,
    check_size,
    split_evenly,
)
from meshlib._calls.spec import CallSpec
from meshlib._calls.work import Work
from meshlib._collectives.group_of_ranks import GroupOfRanks, spec_of
from meshlib._collectives.packing import copy_out, fingerprint, finish, gather_device_arrays, unpack
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._operands.reduce_op import ReduceOp
from transport._waiting.deadline import Timeout

A = TypeVar("A")


class CoalescedCollectives(GroupOfRanks):
    """The coalesced calls. The arrays of a call have one dtype and are sent in one flat buffer.

    The list of sizes is part of the call's fingerprint: members whose lists differ get
    ``CollectiveMismatchError``, even if the totals agree.
    """

    @overload
    def all_reduce_coalesced(
        self,
        tensors: ListOf[A],
        op: ReduceOp = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> list[A]: ...

    @overload
    def all_reduce_coalesced(
        self,
        tensors: ListOf[A],
        op: ReduceOp = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[list[A]]: ...

    @overload
    def all_reduce_coalesced(
        self,
        tensors: ListOf[A],
        op: ReduceOp = ...,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> list[A] | Work[list[A]]: ...

    def all_reduce_coalesced(
        self,
        tensors: ListOf[Any],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Reduce each of ``tensors`` over the members with ``op``, in one call.

        Args:
            tensors: NumPy, JAX or CuPy arrays or buffers that do not overlap, of any shapes and one
                dtype (numeric, bool, or one of ml_dtypes' floats). Their sizes are the same on
                every member. Overwritten if writable.
            op: A ``ReduceOp`` that supports the dtype.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The list of results. With ``async_op``, a ``Work`` with that result. None on a rank
            outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            Kind.ALL_REDUCE, self._prepare_all_reduce_coalesced, (tensors, op), async_op, timeout
        )

    def _prepare_all_reduce_coalesced(self, tensors: ListOf[Any], op: ReduceOp) -> CallSpec:
        xs = adapt_targets(tensors, "tensors", keep=True)
        sizes = [x.flat.size for x in xs]
        op, code = check_reduction(op, xs[0], "tensors[0]", sum(sizes))
        for i, x in enumerate(xs):
            check_same_dtype(x, f"tensors[{i}]", xs[0], "tensors[0]")
        device = xs[0].device

        def run(communicator: Communicator, call: Call) -> Any:
            if device != "cpu":
                # On a device, packing costs more than it saves.
                for x in xs:
                    communicator.all_reduce(call, x.flat, op)
                return finish(call, xs)
            flat = np.concatenate([x.flat for x in xs])
            communicator.all_reduce(call, flat, op)
            return unpack(flat, xs)

        return spec_of(
            Kind.ALL_REDUCE,
            run,
            xs[0],
            code,
            elements=sum(sizes),
            op=op.code,
            extra=fingerprint(sizes),
        )

    @overload
    def all_gather_coalesced(
        self,
        output_tensor_lists: Sequence[ListOf[A]],
        input_tensor_list: ListOf[Any],
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> list[list[A]]: ...

    @overload
    def all_gather_coalesced(
        self,
        output_tensor_lists: Sequence[ListOf[A]],
        input_tensor_list: ListOf[Any],
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[list[list[A]]]: ...

    @overload
    def all_gather_coalesced(
        self,
        output_tensor_lists: Sequence[ListOf[A]],
        input_tensor_list: ListOf[Any],
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> list[list[A]] | Work[list[list[A]]]: ...

    def all_gather_coalesced(
        self,
        output_tensor_lists: Sequence[ListOf[Any]],
        input_tensor_list: ListOf[Any],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Gather member i's ``input_tensor_list[j]`` into ``output_tensor_lists[i][j]``.

        Args:
            output_tensor_lists: For each member, in group order, one array for each of its inputs.
                No array overlaps another one or an input.
            input_tensor_list: NumPy, JAX or CuPy arrays or buffers, of any shapes and one dtype
                (numeric, bool, or one of ml_dtypes' floats). Their number and sizes may differ by
                member.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The lists of gathered arrays. With ``async_op``, a ``Work`` with that result. None on
            a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            Kind.ALL_GATHER,
            self._prepare_all_gather_coalesced,
            (output_tensor_lists, input_tensor_list),
            async_op,
            timeout,
        )

    def _prepare_all_gather_coalesced(
        self, output_tensor_lists: Sequence[ListOf[Any]], input_tensor_list: ListOf[Any]
    ) -> CallSpec:
        call_queue = self._call_queue
        name = "output_tensor_lists"
        check_list(output_tensor_lists, name, len(call_queue.ranks))
        ins = adapt_sources(input_tensor_list, "input_tensor_list")
        code = check_dtype(ins[0], "input_tensor_list[0]")
        outs: list[list[AdaptedArray]] = []
        for i, tensors in enumerate(output_tensor_lists):
            size = len(ins) if i == call_queue.rank else None
            each = "one for each of input_tensor_list"
            outs.append(adapt_targets(tensors, f"{name}[{i}]", size, each))
        for j, x in enumerate(ins):
            check_same_dtype(x, f"input_tensor_list[{j}]", ins[0], "input_tensor_list[0]")
            own = f"{name}[{call_queue.rank}][{j}]"
            why = f"the size of input_tensor_list[{j}]"
            check_size(outs[call_queue.rank][j], own, x.flat.size, why)
        for i, row in enumerate(outs):
            for j, out in enumerate(row):
                check_same_dtype(out, f"{name}[{i}][{j}]", ins[0], "input_tensor_list[0]")
                for k, x in enumerate(ins):
                    check_no_overlap(out, f"{name}[{i}][{j}]", x, f"input_tensor_list[{k}]")
        check_disjoint([out for row in outs for out in row], name)
        sizes = [[out.flat.size for out in row] for row in outs]
        dtype = ins[0].flat.dtype
        device = ins[0].device

        def run(communicator: Communicator, call: Call) -> Any:
            if device != "cpu":
                return gather_device_arrays(communicator, call, ins, outs)
            flats = [np.empty(sum(row), dtype) for row in sizes]
            communicator.all_gather(call, flats, np.concatenate([x.flat for x in ins]))
            return [unpack(flat, row) for flat, row in zip(flats, outs, strict=True)]

        return spec_of(
            Kind.ALL_GATHER,
            run,
            ins[0],
            code,
            elements=sum(map(sum, sizes)),
            extra=fingerprint(size for row in sizes for size in (len(row), *row)),
        )

    @overload
    def all_gather_into_tensor_coalesced(
        self,
        output_tensors: ListOf[A],
        input_tensors: ListOf[Any],
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> list[A]: ...

    @overload
    def all_gather_into_tensor_coalesced(
        self,
        output_tensors: ListOf[A],
        input_tensors: ListOf[Any],
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[list[A]]: ...

    @overload
    def all_gather_into_tensor_coalesced(
        self,
        output_tensors: ListOf[A],
        input_tensors: ListOf[Any],
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> list[A] | Work[list[A]]: ...

    def all_gather_into_tensor_coalesced(
        self,
        output_tensors: ListOf[Any],
        input_tensors: ListOf[Any],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Gather the members' ``input_tensors[j]`` into ``output_tensors[j]`` on all members.

        Args:
            output_tensors: Writable arrays of one dtype, as many as ``input_tensors``; each has
                ``size()`` times the elements of its input, concatenated along dim 0 or stacked.
            input_tensors: Arrays of that dtype; their shapes are the same on every member.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline, in seconds or as a timedelta; by default the group's.

        Returns:
            ``output_tensors``, with new arrays in place of read-only ones. With ``async_op``, a
            ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            Kind.ALL_GATHER,
            self._prepare_all_gather_into_coalesced,
            (output_tensors, input_tensors),
            async_op,
            timeout,
        )

    def _prepare_all_gather_into_coalesced(
        self, output_tensors: ListOf[Any], input_tensors: ListOf[Any]
    ) -> CallSpec:
        call_queue = self._call_queue
        ins = adapt_sources(input_tensors, "input_tensors")
        outs = adapt_targets(output_tensors, "output_tensors", len(ins), "one for each input")
        code, size = check_dtype(ins[0], "input_tensors[0]"), len(call_queue.ranks)
        _check_pairs(outs, "output_tensors", ins, "input_tensors", size)
        sizes, dtype = [x.flat.size for x in ins], ins[0].flat.dtype
        parts = [split_evenly(out.flat, size) for out in outs]
        device = ins[0].device

        def run(communicator: Communicator, call: Call) -> Any:
            if device != "cpu":
                for part, x in zip(parts, ins, strict=True):
                    communicator.all_gather(call, part, x.flat)
                return finish(call, outs)
            rows = [np.empty(sum(sizes), dtype) for _ in range(size)]
            communicator.all_gather(call, rows, np.concatenate([x.flat for x in ins]))
            for member, row in enumerate(rows):
                copy_out(row, [part[member] for part in parts])
            return [out.finish() for out in outs]

        return spec_of(
            Kind.ALL_GATHER,
            run,
            ins[0],
            code,
            elements=size * sum(sizes),
            extra=fingerprint(sizes),
        )

    @overload
    def reduce_scatter_tensor_coalesced(
        self,
        output_tensors: ListOf[A],
        input_tensors: ListOf[Any],
        op: ReduceOp = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> list[A]: ...

    @overload
    def reduce_scatter_tensor_coalesced(
        self,
        output_tensors: ListOf[A],
        input_tensors: ListOf[Any],
        op: ReduceOp = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[list[A]]: ...

    @overload
    def reduce_scatter_tensor_coalesced(
        self,
        output_tensors: ListOf[A],
        input_tensors: ListOf[Any],
        op: ReduceOp = ...,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> list[A] | Work[list[A]]: ...

    def reduce_scatter_tensor_coalesced(
        self,
        output_tensors: ListOf[Any],
        input_tensors: ListOf[Any],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Reduce the members' ``input_tensors[j]``; member i gets part i in ``output_tensors[j]``.

        Args:
            output_tensors: Writable arrays of any shapes and one dtype, the same on every member.
            input_tensors: As many arrays of that dtype; each has ``size()`` times the elements of
                its output, concatenated along dim 0 or stacked.
            op: A ``ReduceOp`` that supports the dtype.
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline, in seconds or as a timedelta; by default the group's.

        Returns:
            ``output_tensors``, with new arrays in place of read-only ones. With ``async_op``, a
            ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            Kind.REDUCE_SCATTER,
            self._prepare_reduce_scatter_tensor_coalesced,
            (output_tensors, input_tensors, op),
            async_op,
            timeout,
        )

    def _prepare_reduce_scatter_tensor_coalesced(
        self, output_tensors: ListOf[Any], input_tensors: ListOf[Any], op: ReduceOp
    ) -> CallSpec:
        call_queue = self._call_queue
        ins = adapt_sources(input_tensors, "input_tensors")
        outs = adapt_targets(output_tensors, "output_tensors", len(ins), "one for each input")
        sizes, size = [out.flat.size for out in outs], len(call_queue.ranks)
        op, code = check_reduction(op, outs[0], "output_tensors[0]", sum(sizes))
        _check_pairs(ins, "input_tensors", outs, "output_tensors", size)
        dtype, device = outs[0].flat.dtype, outs[0].device
        parts = [split_evenly(x.flat, size) for x in ins]

        def run(communicator: Communicator, call: Call) -> Any:
            if device != "cpu":
                for out, part in zip(outs, parts, strict=True):
                    communicator.reduce_scatter(call, out.flat, part, op)
                return finish(call, outs)
            flat = np.empty(sum(sizes), dtype)
            rows = [np.concatenate([part[member] for part in parts]) for member in range(size)]
            communicator.reduce_scatter(call, flat, rows, op)
            return unpack(flat, outs)

        return spec_of(
            Kind.REDUCE_SCATTER,
            run,
            outs[0],
            code,
            elements=size * sum(sizes),
            op=op.code,
            extra=fingerprint(sizes),
        )


def _check_pairs(
    whole: Sequence[AdaptedArray],
    name: str,
    parts: Sequence[AdaptedArray],
    part_name: str,
    size: int,
) -> None:
    """Check that each array in ``whole`` has ``size`` times the elements of its part."""
    check_disjoint(whole if name.startswith("output") else parts, "output_tensors")
    for j, (large, small) in enumerate(zip(whole, parts, strict=True)):
        check_same_dtype(small, f"{part_name}[{j}]", parts[0], f"{part_name}[0]")
        check_same_dtype(large, f"{name}[{j}]", parts[0], f"{part_name}[0]")
        expected = f"{size} times the size of {part_name}[{j}]"
        check_size(large, f"{name}[{j}]", size * small.flat.size, expected)
    for j, large in enumerate(whole):
        for k, small in enumerate(parts):
            check_no_overlap(large, f"{name}[{j}]", small, f"{part_name}[{k}]")
