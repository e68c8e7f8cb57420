"""The collectives on tensors of c10d's process groups, by meshlib's collectives on arrays.

A synchronous call (``opts.asyncOp`` is false) runs in the caller's thread and raises there.
``opts.timeout``, if set, is the call's deadline. Lists of lists have one entry, as with Gloo: in
early c10d they had an entry for each GPU of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from typing import Any

from meshlib._calls.work import Work, collect_all
from meshlib._groups.process_group import ProcessGroup
from meshlib.torch._finishing import Finish, average_of_integers, finished, without_repeats
from meshlib.torch._hooks import CallHooks
from meshlib.torch._not_compiled import not_compiled
from meshlib.torch._tensors import Array, array, arrays, reduction
from meshlib.torch._works import ContinuationThreads, TorchWork
from transport._operands.reduce_op import ReduceOp

_c10d: Any = import_module("torch._C._distributed_c10d")

Tensors = Sequence[Any]
Call = Callable[..., Any]
_UNSET = timedelta(0)  # c10d also uses negative values


def _c10ds(options: str = "", of: int | None = 0) -> Callable[[Call], Call]:
    """Return a decorator that makes a method callable by c10d, with defaults, devices and hooks.

    The device of argument number ``of``, a tensor or a list of tensors, selects the backend. The
    last argument, ``opts``, defaults to c10d's class named ``options``.
    """

    def decorate(method: Call) -> Call:
        name, last = method.__name__, method.__code__.co_argcount - 2

        def call(self: TensorCollectives, *arguments: Any, **named: Any) -> Any:
            if options:
                if len(arguments) > last:
                    arguments, named["opts"] = arguments[:-1], arguments[-1]
                if named.get("opts") is None:
                    named["opts"] = getattr(_c10d, options)()
            if of is not None:
                tensors = arguments[of]
                first = tensors[:1] if isinstance(tensors, (list, tuple)) else [tensors]
                if first and (device := first[0].device.type) != "cpu":
                    return getattr(self.group_for_device(device), name)(*arguments, **named)
            if self.call_hooks.is_empty():
                return method(self, *arguments, **named)
            both = ((), ()) if of is None else (arguments[0], arguments[of])
            make = partial(method, self, *arguments, **named)
            return self.call_hooks.make(name, *both, named.get("opts"), make)

        return wraps(method)(not_compiled(call))

    return decorate


class TensorCollectives:
    """The calls of a process group on tensors; ``mesh_group`` runs those on CPU tensors."""

    continuations: ContinuationThreads
    call_hooks: CallHooks

    @property
    def mesh_group(self) -> ProcessGroup:
        """meshlib's group of these ranks."""
        raise NotImplementedError

    def group_for_device(self, device: str) -> Any:
        """Return the process group for tensors on ``device``."""
        raise NotImplementedError

    def _reduction(
        self, opts: Any, inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> tuple[ReduceOp, Finish | None]:
        """Return the op for ``inputs``, and the step that finishes ``outputs`` after the call."""
        op = reduction(opts.reduceOp)
        return average_of_integers(op, inputs, outputs, self.mesh_group.size())

    def _issue(
        self, outputs: Tensors, opts: Any, calls: Sequence[Call], finish: Finish | None = None
    ) -> TorchWork:
        """Issue ``calls`` in sequence, then ``finish()``, as one Work for ``outputs``."""
        timeout = opts.timeout if opts.timeout > _UNSET else None
        if not opts.asyncOp:
            for call in calls:
                call(timeout=timeout)
            if finish is not None:
                finish()
            return TorchWork(None, outputs, self.continuations, self.mesh_group, timeout=timeout)
        works = [call(async_op=True, timeout=timeout) for call in calls]
        work: Work[Any] = works[0] if len(works) == 1 else collect_all(works)
        if finish is not None:
            work = finished(work, finish)
        return TorchWork(work, outputs, self.continuations, self.mesh_group, timeout=timeout)

    # ------------------------------------------------------------------ to all

    @_c10ds("BroadcastOptions")
    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        make = partial(self.mesh_group.broadcast, group_src=opts.rootRank)
        return self._issue(tensors, opts, [partial(make, x) for x in arrays(tensors)])

    @_c10ds("AllreduceOptions")
    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        xs = arrays(tensors)
        op, finish = self._reduction(opts, xs, xs)
        make = partial(self.mesh_group.all_reduce, op=op)
        return self._issue(tensors, opts, [partial(make, x) for x in xs], finish)

    @_c10ds("AllreduceCoalescedOptions")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        xs = arrays(tensors)
        op, finish = self._reduction(opts, xs, xs)
        make = partial(self.mesh_group.all_reduce_coalesced, xs, op)
        return self._issue(tensors, opts, [make], finish)

    @_c10ds("AllgatherOptions", of=1)
    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        outputs, x = _only(output_lists, "output_tensors"), _only(inputs, "input_tensors")
        parts, finish = without_repeats(arrays(outputs))
        make = partial(self.mesh_group.all_gather, parts, array(x))
        return self._issue(outputs, opts, [make], finish)

    @_c10ds("AllgatherOptions", of=1)
    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any
    ) -> Any:
        outputs = [arrays(tensors) for tensors in output_lists]
        make = partial(self.mesh_group.all_gather_coalesced, outputs, arrays(inputs))
        flat = [tensor for tensors in output_lists for tensor in tensors]
        return self._issue(flat, opts, [make])

    @_c10ds("AllgatherOptions", of=1)
    def all_gather_single(self, output: Any, input: Any, opts: Any) -> Any:
        return self._all_gather_each([output], [input], opts)

    @_c10ds("AllgatherOptions", of=1)
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        return self._all_gather_each(outputs, inputs, opts)

    def _all_gather_each(self, outputs: Tensors, inputs: Tensors, opts: Any) -> TorchWork:
        group, outs, ins = self.mesh_group, arrays(outputs), arrays(inputs)
        if len(ins) > 1 and _of_one_dtype(ins):
            make = partial(group.all_gather_into_tensor_coalesced, outs, ins)
            return self._issue(outputs, opts, [make])
        pairs = zip(outs, ins, strict=True)
        calls = [partial(group.all_gather_into_tensor, out, x) for out, x in pairs]
        return self._issue(outputs, opts, calls)

    @_c10ds("BarrierOptions", of=None)
    def barrier(self, opts: Any) -> Any:
        return self._issue((), opts, [self.mesh_group.barrier])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self.mesh_group.monitored_barrier(timeout, wait_all_ranks)

    # ------------------------------------------------------------------ to one, from one

    @_c10ds("ReduceOptions")
    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        xs = arrays(tensors)
        at_root = self.mesh_group.rank() == opts.rootRank
        op, finish = self._reduction(opts, xs, xs if at_root else ())
        make = partial(self.mesh_group.reduce, op=op, group_dst=opts.rootRank)
        return self._issue(tensors, opts, [partial(make, x) for x in xs], finish)

    @_c10ds("GatherOptions", of=1)
    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        x = _only(inputs, "input_tensors")
        outputs = _only(output_lists, "output_tensors") if output_lists else None
        make = partial(
            self.mesh_group.gather,
            array(x),
            None if outputs is None else arrays(outputs),
            group_dst=opts.rootRank,
        )
        return self._issue(outputs or (), opts, [make])

    @_c10ds("ScatterOptions")
    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> Any:
        out = _only(outputs, "output_tensors")
        make = partial(
            self.mesh_group.scatter,
            array(out),
            arrays(_only(input_lists, "input_tensors")) if input_lists else None,
            group_src=opts.rootRank,
        )
        return self._issue(outputs, opts, [make])

    @_c10ds("GatherOptions", of=1)
    def gather_single(self, output: Any, input: Any, opts: Any) -> Any:
        group, root = self.mesh_group, opts.rootRank
        # On other ranks the output is c10d's placeholder.
        parts = output.view(group.size(), *input.shape) if group.rank() == root else None
        outputs = None if parts is None else arrays(parts)
        make = partial(group.gather, array(input), outputs, group_dst=root)
        return self._issue([output], opts, [make])

    # ------------------------------------------------------------------ to each its own

    @_c10ds("ReduceScatterOptions")
    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> Any:
        out, inputs = _only(outputs, "output_tensors"), _only(input_lists, "input_tensors")
        to, parts = array(out), arrays(inputs)
        op, finish = self._reduction(opts, parts, [to])
        make = partial(self.mesh_group.reduce_scatter, to, parts, op)
        return self._issue(outputs, opts, [make], finish)

    @_c10ds("ReduceScatterOptions", of=1)
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
        return self._reduce_scatter_each([output], [input], opts)

    @_c10ds("ReduceScatterOptions", of=1)
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        return self._reduce_scatter_each(outputs, inputs, opts)

    def _reduce_scatter_each(self, outputs: Tensors, inputs: Tensors, opts: Any) -> TorchWork:
        group, outs, ins = self.mesh_group, arrays(outputs), arrays(inputs)
        op, finish = self._reduction(opts, ins, outs)
        if len(ins) > 1 and _of_one_dtype(ins):
            make = partial(group.reduce_scatter_tensor_coalesced, outs, ins, op)
            return self._issue(outputs, opts, [make], finish)
        pairs = zip(outs, ins, strict=True)
        calls = [partial(group.reduce_scatter_tensor, out, x, op) for out, x in pairs]
        return self._issue(outputs, opts, calls, finish)

    @_c10ds("AllToAllOptions", of=1)
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        make = partial(self.mesh_group.all_to_all, arrays(outputs), arrays(inputs))
        return self._issue(outputs, opts, [make])

    @_c10ds("AllToAllOptions", of=1)
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        # C++ passes an empty list for None.
        splits = output_split_sizes or None, input_split_sizes or None
        make = partial(self.mesh_group.all_to_all_single, array(output), array(input), *splits)
        return self._issue([output], opts, [make])

    # ------------------------------------------------------------------ messages

    @_c10ds()
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        work = self.mesh_group.isend(array(_only(tensors, "tensors")), group_dst=dst, tag=tag)
        assert work is not None  # this rank is a member
        return TorchWork(work, tensors, self.continuations, self.mesh_group)

    @_c10ds()
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Any:
        return self._receive(tensors, src, tag)

    @_c10ds()
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, src: int | None, tag: int) -> TorchWork:
        into = array(_only(tensors, "tensors"))
        work = self.mesh_group.irecv(into, group_src=src, tag=tag)
        assert work is not None  # this rank is a member
        return TorchWork(work, tensors, self.continuations, self.mesh_group, receives=True)

    # ------------------------------------------------------------------ c10d's other names

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single
    alltoall_base = all_to_all_single


def _of_one_dtype(items: Sequence[Array]) -> bool:
    return len({item.dtype for item in items}) == 1


def _only(items: Sequence[Any], name: str) -> Any:
    """Return the only entry of ``items``. Raises ValueError for another number of entries."""
    if len(items) != 1:
        raise ValueError(f"{name} has {len(items)} entries; expected one")
    return items[0]
