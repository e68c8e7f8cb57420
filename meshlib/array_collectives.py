"""Every collective on arrays, as a method of whatever is a group of ranks.

All of them go the same way: adapt the arguments to flat buffers, check them, and hand the door
what must be equal on every member together with what is to be run. See ``meshlib.collectives``
for what holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from meshlib import arrays
from meshlib.adapted import Adapted
from meshlib.arguments import (
    adapt_sources,
    adapt_targets,
    check_dtype,
    check_no_overlap,
    check_reduction,
    check_same_dtype,
    check_size,
    same_start,
    split_by_rows,
    split_evenly,
)
from meshlib.point_to_point import PointToPoint
from meshlib.recorder import COLLECTIVE
from transport.call import NO_ROOT, Call, Kind
from transport.communicator import Communicator
from transport.deadline import to_seconds
from transport.reduce_op import ReduceOp

Timeout = float | timedelta | None
# An enumeration looks its members up in Python, which takes a tenth of a microsecond.
_ALL_REDUCE = Kind.ALL_REDUCE


class ArrayCollectives(PointToPoint):
    """The collectives on arrays of one group of ranks."""

    def _issue(
        self,
        kind: Kind,
        run: Callable[[Communicator, Call], Any],
        like: Adapted,
        dtype: int,
        async_op: bool,
        timeout: Timeout,
        elements: int = 0,
        op: int = 0,
        root: int = NO_ROOT,
        extra: int = 0,
        nbytes: int | None = None,
    ) -> Any:
        """Make a call on arrays that are ``like`` one of them; see ``ProcessGroup.issue``.

        ``dtype`` is its code; ``nbytes`` is what ``elements`` take, unless given.
        """
        group, limit = self.process_group, self.call_timeout(timeout)
        device, shortcut = like.device, group.shortcut
        if nbytes is None:
            nbytes = elements * like.flat.itemsize
        # Arguments by position: names take a quarter of a microsecond longer.
        if shortcut is not None and not async_op and device == "cpu":
            seconds = group.seconds if limit is None else to_seconds(limit)
            result = shortcut.issue(run, seconds, nbytes, elements, root, kind, dtype, op, extra)
            if result is not NotImplemented:
                return result
        what = (kind, run, device, elements, dtype, op, root, extra, nbytes, COLLECTIVE)
        return group.issue(*what, async_op, limit)

    def all_reduce(
        self,
        tensor: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce ``tensor`` over the members; all get the result, bit for bit the same.

        ``tensor`` has any shape and the same number of elements and dtype on every member.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        shortcut = group.shortcut
        if (
            shortcut is not None
            and type(tensor) is np.ndarray
            and type(op) is ReduceOp
            and not async_op
        ):
            seconds = self.call_timeout(timeout)
            seconds = group.seconds if seconds is None else to_seconds(seconds)
            if shortcut.all_reduce(tensor, op, op.code, seconds) is not None:
                return tensor
        # The small call that counts is a repeated one, on a NumPy array that is reduced where it
        # lies. That needs no more than this; ``adapted`` arrays take two microseconds longer.
        if (
            type(tensor) is np.ndarray
            and type(op) is ReduceOp
            and (code := op.codes.get(tensor.dtype)) is not None
            and tensor.flags.carray
        ):
            flat, device, finish = tensor.ravel(), "cpu", None
        else:
            x = arrays.in_out(tensor, "tensor")
            op, code = check_reduction(op, x, "tensor")
            flat, device, finish = x.flat, x.device, x.finish

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.all_reduce(call, flat, op)
            return tensor if finish is None else finish()

        return group.issue(
            _ALL_REDUCE,
            run,
            device,
            flat.size,
            code,
            op.code,
            NO_ROOT,
            0,
            flat.nbytes,
            COLLECTIVE,
            async_op,
            self.call_timeout(timeout),
        )

    def broadcast(
        self,
        tensor: Any,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
        timeout: Timeout = None,
    ) -> Any:
        """Copy ``tensor`` of the member ``src`` (global) or ``group_src`` to all members."""
        group = self.process_group
        if group.rank() < 0:
            return None
        root = self.resolve_rank(src, group_src, "src")
        is_root = root == group.rank()
        x = arrays.source(tensor, "tensor") if is_root else arrays.target(tensor, "tensor")
        code = check_dtype(x, "tensor")

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.broadcast(call, x.flat, root)
            return x.finish()

        return self._issue(
            Kind.BROADCAST, run, x, code, async_op, timeout, elements=x.flat.size, root=root
        )

    def reduce(
        self,
        tensor: Any,
        dst: int | None = None,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce ``tensor`` into that of the member ``dst`` (global) or ``group_dst``.

        The other members' arrays are left as they were.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        root = self.resolve_rank(dst, group_dst, "dst")
        is_root = root == group.rank()
        x = arrays.in_out(tensor, "tensor") if is_root else arrays.source(tensor, "tensor")
        op, code = check_reduction(op, x, "tensor")

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.reduce(call, x.flat, op, root)
            return x.finish()

        return self._issue(
            Kind.REDUCE,
            run,
            x,
            code,
            async_op,
            timeout,
            elements=x.flat.size,
            op=op.code,
            root=root,
        )

    def all_gather(
        self,
        tensor_list: Sequence[Any],
        tensor: Any,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Gather member i's ``tensor`` into ``tensor_list[i]`` on all members.

        Sizes may differ by member: ``tensor_list[i]`` has member i's size everywhere.
        Returns the list.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        x = arrays.source(tensor, "tensor")
        code = check_dtype(x, "tensor")
        outs = adapt_targets(tensor_list, "tensor_list", len(group.ranks))
        mine = outs[group.rank()]
        check_size(mine, f"tensor_list[{group.rank()}]", x.flat.size, "the size of tensor")
        for i, out in enumerate(outs):
            check_same_dtype(out, f"tensor_list[{i}]", x, "tensor")
            if i != group.rank() or not same_start(out.flat, x.flat):
                check_no_overlap(out, f"tensor_list[{i}]", x, "tensor")
        flats = [out.flat for out in outs]
        total = sum(flat.size for flat in flats)

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.all_gather(call, flats, x.flat)
            return [out.finish() for out in outs]

        return self._issue(Kind.ALL_GATHER, run, x, code, async_op, timeout, elements=total)

    def all_gather_into_tensor(
        self,
        output_tensor: Any,
        input_tensor: Any,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Gather the members' ``input_tensor`` into ``output_tensor`` on all members.

        ``output_tensor`` has ``size()`` times the elements, concatenated along dim 0 or stacked
        in a new first dim: the memory is the same. ``input_tensor`` may be this member's part of
        ``output_tensor``.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        x = arrays.source(input_tensor, "input_tensor")
        code = check_dtype(x, "input_tensor")
        out = arrays.target(output_tensor, "output_tensor")
        size = len(group.ranks)
        check_same_dtype(out, "output_tensor", x, "input_tensor")
        check_size(out, "output_tensor", size * x.flat.size, f"{size} times input_tensor's size")
        flats = split_evenly(out.flat, size)
        if not same_start(x.flat, flats[group.rank()]):
            check_no_overlap(out, "output_tensor", x, "input_tensor")

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.all_gather(call, flats, x.flat)
            return out.finish()

        return self._issue(Kind.ALL_GATHER, run, x, code, async_op, timeout, elements=out.flat.size)

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce the members' ``input_list[i]`` into member i's ``output``.

        Sizes may differ by i; ``input_list[rank]`` has the size of ``output``.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        out = arrays.target(output, "output")
        ins = adapt_sources(input_list, "input_list", len(group.ranks))
        op, code = check_reduction(op, out, "output")
        check_size(
            out, "output", ins[group.rank()].flat.size, f"the size of input_list[{group.rank()}]"
        )
        for i, x in enumerate(ins):
            check_same_dtype(x, f"input_list[{i}]", out, "output")
            if i != group.rank() or not same_start(out.flat, x.flat):
                check_no_overlap(out, "output", x, f"input_list[{i}]")
        flats = [x.flat for x in ins]
        total = sum(flat.size for flat in flats)

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.reduce_scatter(call, out.flat, flats, op)
            return out.finish()

        return self._issue(
            Kind.REDUCE_SCATTER, run, out, code, async_op, timeout, elements=total, op=op.code
        )

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce the members' ``input`` and leave part i of the result in member i's ``output``.

        ``input`` has ``size()`` times the elements of ``output``, concatenated or stacked.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        out = arrays.target(output, "output")
        x = arrays.source(input, "input")
        op, code = check_reduction(op, out, "output")
        size = len(group.ranks)
        check_same_dtype(x, "input", out, "output")
        check_size(x, "input", size * out.flat.size, f"{size} times the size of output")
        flats = split_evenly(x.flat, size)
        if not same_start(out.flat, flats[group.rank()]):
            check_no_overlap(out, "output", x, "input")

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.reduce_scatter(call, out.flat, flats, op)
            return out.finish()

        return self._issue(
            Kind.REDUCE_SCATTER, run, out, code, async_op, timeout, elements=x.flat.size, op=op.code
        )

    def gather(
        self,
        tensor: Any,
        gather_list: Sequence[Any] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
        timeout: Timeout = None,
    ) -> Any:
        """Gather the ``tensor`` into ``gather_list[i]`` of ``dst`` (global) or ``group_dst``.

        The destination is group rank 0 when neither is given. ``gather_list`` is given there and
        nowhere else; it is returned there, None elsewhere.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        root = self.resolve_rank(dst, group_dst, "dst", default=0)
        x = arrays.source(tensor, "tensor")
        code = check_dtype(x, "tensor")
        outs = None
        if root == group.rank():
            if gather_list is None:
                raise ValueError(
                    f"gather_list is None on the destination, rank {group.ranks[root]}; expected a"
                    " list"
                )
            outs = adapt_targets(gather_list, "gather_list", len(group.ranks))
            for i, out in enumerate(outs):
                check_same_dtype(out, f"gather_list[{i}]", x, "tensor")
            name = f"gather_list[{root}]"
            check_size(outs[root], name, x.flat.size, "the size of tensor")
        elif gather_list:
            raise ValueError(
                f"gather_list was given on rank {group.ranks[group.rank()]}, which is not the"
                f" destination, {group.ranks[root]}; expected None"
            )
        flats = None if outs is None else [out.flat for out in outs]

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.gather(call, flats, x.flat, root)
            return None if outs is None else [out.finish() for out in outs]

        return self._issue(
            Kind.GATHER, run, x, code, async_op, timeout, root=root, nbytes=x.flat.nbytes
        )

    def scatter(
        self,
        tensor: Any,
        scatter_list: Sequence[Any] | None = None,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
        timeout: Timeout = None,
    ) -> Any:
        """Copy ``scatter_list[i]`` of ``src`` (global) or ``group_src`` to member i's ``tensor``.

        The source is group rank 0 when neither is given. ``scatter_list`` is given there and
        nowhere else.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        root = self.resolve_rank(src, group_src, "src", default=0)
        out = arrays.target(tensor, "tensor")
        code = check_dtype(out, "tensor")
        ins = None
        if root == group.rank():
            if scatter_list is None:
                raise ValueError(
                    f"scatter_list is None on the source, rank {group.ranks[root]}; expected a list"
                )
            ins = adapt_sources(scatter_list, "scatter_list", len(group.ranks))
            for i, x in enumerate(ins):
                check_same_dtype(x, f"scatter_list[{i}]", out, "tensor")
            check_size(out, "tensor", ins[root].flat.size, f"the size of scatter_list[{root}]")
        elif scatter_list:
            raise ValueError(
                f"scatter_list was given on rank {group.ranks[group.rank()]}, which is not the"
                f" source, {group.ranks[root]}; expected None"
            )
        flats = None if ins is None else [x.flat for x in ins]

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.scatter(call, out.flat, flats, root)
            return out.finish()

        return self._issue(
            Kind.SCATTER, run, out, code, async_op, timeout, root=root, nbytes=out.flat.nbytes
        )

    def all_to_all(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_list: Sequence[Any],
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Copy member i's ``input_tensor_list[j]`` into member j's ``output_tensor_list[i]``.

        All sizes may differ, as long as both ends agree on each. Returns the output list.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        size = len(group.ranks)
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

        return self._issue(
            Kind.ALL_TO_ALL,
            run,
            ins[0],
            code,
            async_op,
            timeout,
            nbytes=sum(flat.nbytes for flat in in_flats),
        )

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Split ``input`` along dim 0, send part j to member j, join what comes in ``output``.

        Split sizes count rows of dim 0; without them the parts are equal.
        """
        group = self.process_group
        if group.rank() < 0:
            return None
        size = len(group.ranks)
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

        return self._issue(Kind.ALL_TO_ALL, run, x, code, async_op, timeout, nbytes=x.flat.nbytes)
