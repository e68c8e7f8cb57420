"""Collectives with separate data for each pair of members: gather, scatter, all-to-all."""

# A call without async_op matches the first two overloads of a method; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from meshlib._arrays import adapter as arrays
from meshlib._arrays.adapted import ListOf
from meshlib._arrays.checks import (
    adapt_sources,
    adapt_targets,
    check_dtype,
    check_no_overlap,
    check_same_dtype,
    check_size,
    split_by_rows,
)
from meshlib._calls.spec import CallSpec
from meshlib._calls.work import Work
from meshlib._collectives.group_of_ranks import ARRAYS, LISTS, GroupOfRanks, resolve_rank, spec_of
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._waiting.deadline import Timeout

A = TypeVar("A")

# Looking up a member of an enumeration takes time in each call.
_GATHER, _SCATTER, _ALL_TO_ALL = Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL


class PersonalizedCollectives(GroupOfRanks):
    """The personalized collectives, as the literature calls them."""

    @overload
    def gather(
        self,
        tensor: A,
        gather_list: ListOf[A] | None = ...,
        dst: int | None = ...,
        async_op: Literal[False] = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> list[A] | None: ...

    @overload
    def gather(
        self,
        tensor: A,
        gather_list: ListOf[A] | None = ...,
        dst: int | None = ...,
        async_op: Literal[True] = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> Work[list[A] | None]: ...

    @overload
    def gather(
        self,
        tensor: A,
        gather_list: ListOf[A] | None = ...,
        dst: int | None = ...,
        async_op: bool = ...,
        group_dst: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> list[A] | Work[list[A] | None] | None: ...

    def gather(
        self,
        tensor: Any,
        gather_list: ListOf[Any] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Gather member i's ``tensor`` into ``gather_list[i]`` of one member.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Its size may differ by member.
            gather_list: On the destination, one array for each member, in group order, with the
                size and dtype of its ``tensor``; None elsewhere.
            dst: The global rank of the destination; by default that of group rank 0.
            async_op: Return a ``Work`` at once instead of the result.
            group_dst: The destination's rank in the group, instead of ``dst``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The list of gathered arrays on the destination, None elsewhere. With ``async_op``, a
            ``Work`` with that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _GATHER,
            self._prepare_gather,
            (tensor, gather_list, dst, group_dst),
            async_op,
            timeout,
            LISTS,
        )

    def _prepare_gather(
        self, tensor: Any, gather_list: ListOf[Any] | None, dst: int | None, group_dst: int | None
    ) -> CallSpec:
        call_queue = self._call_queue
        root = resolve_rank(self, dst, group_dst, "dst", default=0)
        x = arrays.source(tensor, "tensor")
        code = check_dtype(x, "tensor")
        outs = None
        if root == call_queue.rank:
            given = self._required(gather_list, "gather_list", "destination")
            outs = adapt_targets(given, "gather_list", len(call_queue.ranks))
            for i, out in enumerate(outs):
                check_same_dtype(out, f"gather_list[{i}]", x, "tensor")
            name = f"gather_list[{root}]"
            check_size(outs[root], name, x.flat.size, "the size of tensor")
        elif gather_list is not None and len(gather_list):
            raise ValueError(
                f"gather_list was given on rank {call_queue.ranks[call_queue.rank]}, which is not"
                f" the destination, {call_queue.ranks[root]}; expected None"
            )
        flats = None if outs is None else [out.flat for out in outs]

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.gather(call, flats, x.flat, root)
            return None if outs is None else [out.finish() for out in outs]

        return spec_of(_GATHER, run, x, code, root=root, nbytes=x.flat.nbytes)

    @overload
    def scatter(
        self,
        tensor: A,
        scatter_list: ListOf[Any] | None = ...,
        src: int | None = ...,
        async_op: Literal[False] = ...,
        group_src: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def scatter(
        self,
        tensor: A,
        scatter_list: ListOf[Any] | None = ...,
        src: int | None = ...,
        async_op: Literal[True] = ...,
        group_src: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def scatter(
        self,
        tensor: A,
        scatter_list: ListOf[Any] | None = ...,
        src: int | None = ...,
        async_op: bool = ...,
        group_src: int | None = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def scatter(
        self,
        tensor: Any,
        scatter_list: ListOf[Any] | None = None,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
        timeout: Timeout | None = None,
    ) -> Any:
        """Copy ``scatter_list[i]`` of one member into member i's ``tensor``.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. Its size may differ by member.
            scatter_list: On the source, one array for each member, in group order, with the size
                and dtype of its ``tensor``; None elsewhere.
            src: The global rank of the source; by default that of group rank 0.
            async_op: Return a ``Work`` at once instead of the result.
            group_src: The source's rank in the group, instead of ``src``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            ``tensor``, or a new array if it is read-only (JAX). With ``async_op``, a ``Work`` with
            that result. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _SCATTER,
            self._prepare_scatter,
            (tensor, scatter_list, src, group_src),
            async_op,
            timeout,
            LISTS,
        )

    def _prepare_scatter(
        self, tensor: Any, scatter_list: ListOf[Any] | None, src: int | None, group_src: int | None
    ) -> CallSpec:
        call_queue = self._call_queue
        root = resolve_rank(self, src, group_src, "src", default=0)
        out = arrays.target(tensor, "tensor")
        code = check_dtype(out, "tensor")
        ins = None
        if root == call_queue.rank:
            given = self._required(scatter_list, "scatter_list", "source")
            ins = adapt_sources(given, "scatter_list", len(call_queue.ranks))
            for i, x in enumerate(ins):
                check_same_dtype(x, f"scatter_list[{i}]", out, "tensor")
            check_size(out, "tensor", ins[root].flat.size, f"the size of scatter_list[{root}]")
        elif scatter_list is not None and len(scatter_list):
            raise ValueError(
                f"scatter_list was given on rank {call_queue.ranks[call_queue.rank]}, which is not"
                f" the source, {call_queue.ranks[root]}; expected None"
            )
        flats = None if ins is None else [x.flat for x in ins]

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.scatter(call, out.flat, flats, root)
            return out.finish()

        return spec_of(_SCATTER, run, out, code, root=root, nbytes=out.flat.nbytes)

    @overload
    def all_to_all(
        self,
        output_tensor_list: ListOf[A],
        input_tensor_list: ListOf[Any],
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> list[A]: ...

    @overload
    def all_to_all(
        self,
        output_tensor_list: ListOf[A],
        input_tensor_list: ListOf[Any],
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[list[A]]: ...

    @overload
    def all_to_all(
        self,
        output_tensor_list: ListOf[A],
        input_tensor_list: ListOf[Any],
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> list[A] | Work[list[A]]: ...

    def all_to_all(
        self,
        output_tensor_list: ListOf[Any],
        input_tensor_list: ListOf[Any],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Copy member i's ``input_tensor_list[j]`` into member j's ``output_tensor_list[i]``.

        Args:
            output_tensor_list: One array for each member, in group order, with the size that the
                member sends. No array overlaps another one or an input.
            input_tensor_list: One array for each member: NumPy, JAX or CuPy arrays or buffers, of
                any shapes and one dtype (numeric, bool, or one of ml_dtypes' floats).
            async_op: Return a ``Work`` at once instead of the result.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The list of outputs. With ``async_op``, a ``Work`` with that result. None on a rank
            outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
                arguments raise CollectiveMismatchError; if there are none, the group stays usable.
            CollectiveMismatchError: On every member, if the members' calls differ.
            CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
            RankFailedError: On every member, if one dies or leaves. These three break the group.
        """
        return self._issue(
            _ALL_TO_ALL,
            self._prepare_all_to_all,
            (output_tensor_list, input_tensor_list),
            async_op,
            timeout,
            LISTS,
        )

    def _prepare_all_to_all(
        self, output_tensor_list: ListOf[Any], input_tensor_list: ListOf[Any]
    ) -> CallSpec:
        call_queue = self._call_queue
        size = len(call_queue.ranks)
        outs = adapt_targets(output_tensor_list, "output_tensor_list", size)
        ins = adapt_sources(input_tensor_list, "input_tensor_list", size)
        code = check_dtype(ins[0], "input_tensor_list[0]")
        for i, (out, x) in enumerate(zip(outs, ins, strict=True)):
            check_same_dtype(x, f"input_tensor_list[{i}]", ins[0], "input_tensor_list[0]")
            check_same_dtype(out, f"output_tensor_list[{i}]", ins[0], "input_tensor_list[0]")
        for i, out in enumerate(outs):
            for j, x in enumerate(ins):
                check_no_overlap(out, f"output_tensor_list[{i}]", x, f"input_tensor_list[{j}]")
        out_flats = [out.flat for out in outs]
        in_flats = [x.flat for x in ins]

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.all_to_all(call, out_flats, in_flats)
            return [out.finish() for out in outs]

        return spec_of(
            _ALL_TO_ALL,
            run,
            ins[0],
            code,
            nbytes=sum(flat.nbytes for flat in in_flats),
        )

    @overload
    def all_to_all_single(
        self,
        output: A,
        input: Any,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> A: ...

    @overload
    def all_to_all_single(
        self,
        output: A,
        input: Any,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work[A]: ...

    @overload
    def all_to_all_single(
        self,
        output: A,
        input: Any,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> A | Work[A]: ...

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Split ``input`` along dim 0, send part j to member j, join received parts in ``output``.

        Args:
            output: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. It does not overlap ``input``.
            input: An array of ``output``'s dtype.
            output_split_sizes: The number of rows of ``output`` from each member; by default equal
                parts.
            input_split_sizes: The number of rows of ``input`` for each member; by default equal
                parts.
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
            _ALL_TO_ALL,
            self._prepare_all_to_all_single,
            (output, input, output_split_sizes, input_split_sizes),
            async_op,
            timeout,
            ARRAYS,
        )

    def _prepare_all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
    ) -> CallSpec:
        call_queue = self._call_queue
        size = len(call_queue.ranks)
        out = arrays.target(output, "output")
        x = arrays.source(input, "input")
        code = check_dtype(x, "input")
        check_same_dtype(out, "output", x, "input")
        check_no_overlap(out, "output", x, "input")
        outs = split_by_rows(out, output_split_sizes, "output", "output_split_sizes", size)
        ins = split_by_rows(x, input_split_sizes, "input", "input_split_sizes", size)

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.all_to_all(call, outs, ins)
            return out.finish()

        return spec_of(_ALL_TO_ALL, run, x, code, nbytes=x.flat.nbytes)
