"""Executes a plan on this rank's part of an array. Nothing else in ``sharding`` communicates.

An asynchronous call issues every collective of the plan at once. Each collective waits
for the result of the previous one when it runs. So all ranks issue the collectives in one order,
even if the program makes other calls meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any
from zlib import crc32

import numpy as np

from meshlib._arrays.checks import check_op
from meshlib._calls.spec import CallSpec
from meshlib._calls.work import ReceivedMessage, Work, when_all
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import current_world, derived_group
from meshlib.sharding._local import (
    Array,
    Box,
    array_module,
    flat_source,
    flat_target,
    module_for,
    neutral,
    relative,
    shape_of,
)
from meshlib.sharding._redistribution.across import messages_from, messages_to
from meshlib.sharding._redistribution.exchange import (
    ExchangeCall,
    ReductionCall,
    StepCall,
    members_of,
)
from meshlib.sharding._redistribution.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    POINT_TO_POINT,
    REDUCE_SCATTER,
    SLICE,
    Plan,
    PlanStep,
)
from meshlib.sharding._sharding_value import ShardingValue
from meshlib.sharding._spec import REDUCTIONS
from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._operands.reduce_op import ReduceOp

Value = Callable[[], Array | None]
"""A function that waits for a rank's array after a step; None on a rank outside the mesh."""

_KINDS = {
    ALL_GATHER: Kind.ALL_GATHER,
    ALL_TO_ALL: Kind.ALL_TO_ALL,
    REDUCE_SCATTER: Kind.REDUCE_SCATTER,
    ALL_REDUCE: Kind.ALL_REDUCE,
}
_TAG = 0xD157A44A
"""The tag of messages from one mesh to another, on their own group."""


def carry_out(plan: Plan, local: Array | None, finish: Callable[[Array | None], Any]) -> Any:
    """Execute ``plan`` on this rank's part ``local``; return ``finish`` of its new part.

    The part is None on a rank outside the mesh. Raises TypeError, before any byte moves, for an op
    that does not apply to the dtype.
    """
    return finish(_PlanExecution(plan, local, async_op=False).value())


def begin(plan: Plan, local: Array | None, finish: Callable[[Array | None], Any]) -> Work[Any]:
    """Begin ``carry_out`` asynchronously; ``local`` must not change until the Work is done."""
    on_gpu = local is not None and array_module(local) is not np
    # A call on a GPU returns once it is queued on a stream, so it need not be asynchronous.
    run = _PlanExecution(plan, local, async_op=not on_gpu)
    return when_all(
        run.works,
        lambda: f"redistribution of {plan.shape} to {plan.target}",
        lambda: finish(run.value()),
    )


class _PlanExecution:
    """The issued steps of a plan; ``value()`` returns this rank's part after the last one."""

    def __init__(self, plan: Plan, local: Array | None, async_op: bool) -> None:
        self.works: list[Work[Any]] = []
        self._plan, self._async = plan, async_op
        self._rank = current_world().rank
        _check_ops(plan)
        self.value: Value = lambda: local
        steps = [step for step in plan.steps if step.kind == POINT_TO_POINT or not _alone(step)]
        for step in steps:
            if step.is_local:
                self.value = self._locally(step, self.value)
            elif step.kind == POINT_TO_POINT:
                self.value = self._across(step, self.value)
            else:
                self.value = self._collectively(step, self.value)
        if plan.steps and all(step.is_local or _alone(step) for step in plan.steps):
            # The result is a view of the caller's array, so it is copied.
            last = self.value
            self.value = lambda: _copied(last())

    def _coordinate(self, sharding: ShardingValue) -> list[int] | None:
        return sharding.mesh.coordinate_of(self._rank)

    def _locally(self, step: PlanStep, ready: Value) -> Value:
        at = self._coordinate(step.source)
        if at is None:
            return ready
        before = step.source.slices_at(self._plan.shape, at)
        after = step.target.slices_at(self._plan.shape, at)

        def value() -> Array | None:
            x = ready()
            if x is None:
                return None
            if step.kind == SLICE:
                return x[relative(after, before)]
            keeps = not any(at[i] for i in step.mesh_dims)
            return x.copy() if keeps else neutral(step.op or "sum", x)

        return value

    # ------------------------------------------------------------------ collectives

    def _collectively(self, step: PlanStep, ready: Value) -> Value:
        if self._coordinate(step.source) is None:
            return ready
        mesh = step.source.mesh
        group = (mesh if mesh.ndim == 1 else mesh[step.mesh_dims]).process_group
        part, queue = self._part_of(step, group), call_queue_of(group)
        dtype = self._plan.dtype
        op = ReduceOp.SUM if step.op is None else REDUCTIONS[step.op]
        header: dict[str, Any] = {
            "elements": part.elements,
            "dtype": dtype_code(dtype),
            "op": 0 if step.op is None else op.code,
            "nbytes": part.elements * dtype.itemsize,
            "extra": _fingerprint(step, self._plan.shape),
        }
        kind = _KINDS[step.kind]
        if not self._async:
            x = ready()
            if array_module(x) is not np:
                part.prepare(x, gaps=False)
                part.pack(0)
                queue.issue(CallSpec(kind, part.call, device="cuda", **header))
                return _given(part.unpack(0))
            ready = _given(x)

        def run(communicator: Communicator, call: Call) -> Array:
            result = None
            for number in range(part.prepare(ready(), gaps=communicator.takes_gaps)):
                part.pack(number)
                part.call(communicator, call)
                result = part.unpack(number)
            return result

        issued = queue.issue(CallSpec(kind, run, **header), self._async)
        if not self._async:
            return _given(issued)
        self.works.append(issued)
        return issued.result

    def _part_of(self, step: PlanStep, group: ProcessGroup) -> StepCall:
        members = members_of(step, self._plan.shape, group.ranks)
        if step.kind in (ALL_GATHER, ALL_TO_ALL):
            return ExchangeCall(step, members, group.rank())
        op = REDUCTIONS[step.op or "sum"]
        return ReductionCall(members, group.rank(), op, scatter=step.kind == REDUCE_SCATTER)

    # ------------------------------------------------------------------ from mesh to mesh

    def _across(self, step: PlanStep, ready: Value) -> Value:
        rank, shape = self._rank, self._plan.shape
        sent = messages_from(step.source, step.target, shape, rank)
        received = messages_to(step.source, step.target, shape, rank)
        if not self._async:
            ready = _given(ready())
        after: Box = ()
        result: Array = None
        if self._coordinate(step.target) is not None:
            after = step.target.slices(shape, rank)
            module = module_for(step.target.mesh.device_type)
            result = module.empty(shape_of(after), self._plan.dtype)

        def part(box: Box) -> Array:
            x = ready()
            assert x is not None, "a member of the source's mesh has a part"
            return x[relative(box, step.source.slices(shape, rank))]

        def send(box: Box, place: int, communicator: Communicator, call: Call) -> None:
            communicator.send(call, flat_source(part(box)).flat, place, _TAG)

        def receive(
            box: Box, place: int, communicator: Communicator, call: Call
        ) -> ReceivedMessage:
            target = flat_target(result[relative(box, after)])
            communicator.recv(call, target.flat, place, _TAG)
            target.finish()
            return ReceivedMessage(None, group.ranks[place])

        works: list[Work[Any]] = []
        remote = [(Kind.RECV, receive, step.target, m) for m in received if m.peer != rank]
        remote += [(Kind.SEND, send, step.source, m) for m in sent if m.peer != rank]
        if remote:
            meshes = (step.source.mesh, step.target.mesh)
            ranks = {mesh.rank_at(place) for mesh in meshes for place in range(mesh.size())}
            # The derived group has its own message numbers, even for the ranks of another mesh.
            members = current_world().registry.group_for(sorted(ranks))
            group = derived_group(members, "redistribution", "redistribution")
            for kind, move, sharding, message in remote:
                place = group.group_rank(message.peer)
                spec = CallSpec(
                    kind,
                    partial(move, message.box, place),
                    prod(shape_of(message.box)),
                    dtype=dtype_code(self._plan.dtype),
                    extra=_TAG,
                    device=sharding.mesh.device_type,
                    peer=place,
                )
                works.append(call_queue_of(group).issue(spec, async_op=True))
        self.works += works

        def finish() -> Array | None:
            for work in works:
                work.wait()
            for message in received:
                if message.peer == rank:
                    result[relative(message.box, after)] = part(message.box)
            return result

        return _once(finish)


def _alone(step: PlanStep) -> bool:
    """True for a collective over one rank, which changes neither the part nor its values."""
    if step.is_local or step.kind == POINT_TO_POINT:
        return False
    return prod(step.source.mesh.shape[i] for i in step.mesh_dims) == 1


def _check_ops(plan: Plan) -> None:
    for step in plan.steps:
        if step.op is not None:
            check_op(REDUCTIONS[step.op], plan.dtype)


def _fingerprint(step: PlanStep, shape: tuple[int, ...]) -> int:
    """Return a number from 1 to 2**32 - 1 by which members detect different redistributions."""
    source, target = step.source, step.target
    plan_key = (shape, source.mesh.shape, source.dims, source.partial_dims)
    plan_key += (target.mesh.shape, target.dims, target.partial_dims)
    return crc32(repr(plan_key).encode()) or 1


def _given(value: Array | None) -> Value:
    return lambda: value


def _copied(value: Array | None) -> Array | None:
    return None if value is None else value.copy()


def _once(make: Value) -> Value:
    """Return a function that calls ``make`` once, and returns its result to every caller."""
    lock = threading.Lock()
    made: list[Array | None] = []

    def value() -> Array | None:
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return value
