"""The collectives inside ``jax.jit``: result, host side, transpose and batching of each.

Ranks are group ranks. Gathered and scattered arrays have the members along dim 0; the public
functions move this dim to the user's axis.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from meshlib._arrays.on_gpu import device_flat
from meshlib._calls.spec import CallSpec
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from meshlib._recording.recorder import COLLECTIVE
from meshlib.jit._collective import InJit, bind, host_struct
from meshlib.jit._xla.direct import DirectCall
from meshlib.jit._xla.program import HostArray, HostFunction
from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import NO_ROOT, Kind
from transport._communicators.base import Communicator
from transport._operands.reduce_op import RedOpType, ReduceOp

_LINEAR = (RedOpType.SUM, RedOpType.AVG)


def flat_of(array: HostArray) -> HostArray:
    """Return the memory of ``array`` as a buffer for communicators."""
    if type(array) is np.ndarray:
        return array
    # A DeviceFlat has the attributes and slices of a NumPy array.
    return cast(HostArray, device_flat(array))


def _rows(array: HostArray) -> list[HostArray]:
    """Return a buffer for each row of ``array``."""
    if type(array) is np.ndarray:
        return list(array)
    flat, rows = flat_of(array), len(array)
    size = flat.size // rows if rows else 0
    return [flat[i * size : (i + 1) * size] for i in range(rows)]


HostSide = Callable[[HostArray, HostArray], None]
"""``call(output, x)`` makes a call on arrays that are flat, or have a row for each member."""


@dataclass(frozen=True)
class Issuing(InJit):
    """The base of collectives that make one call of ``kind``, through a group's call queue.

    The call uses a subclass's fields ``op``, ``root``, ``peer`` and ``tag``, if they exist.
    """

    kind: ClassVar[Kind]
    agreed: ClassVar[bool] = True
    """True if all members must have an equal number of elements."""
    counts_result: ClassVar[bool] = False
    """True if the call's header has the size of the result, not of the operand."""
    is_direct: ClassVar[bool] = True
    """True if the host only makes the call, so that compiled code may make it."""

    @abstractmethod
    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        """Return the arguments of the communicator's method of this kind, after the ``Call``."""

    @property
    def has_result(self) -> bool:
        """True if this member receives data; otherwise its result is zeros."""
        return True

    @property
    def extra(self) -> int:
        """Another number that must be equal on every member (see ``CallHeader``)."""
        return vars(self).get("tag", 0)

    @property
    def carrier(self) -> ProcessGroup:
        """The group that makes the call."""
        return self.group

    def call_spec(self, x: jax.ShapeDtypeStruct) -> Callable[[HostArray, HostArray], CallSpec]:
        """Return a function that makes the ``CallSpec`` of a result and an operand.

        The operand has the shape and dtype of ``x``.
        """
        kind, arguments, own = self.kind, self.arguments, vars(self)
        method = kind.name.lower()
        like = self.result(x) if self.counts_result else x
        dtype, op = np.dtype(like.dtype), own.get("op")
        header = (
            like.size if self.agreed else 0,
            own.get("root", NO_ROOT),
            dtype_code(dtype),
            0 if op is None else op.code,
            self.extra,
            like.size * dtype.itemsize,
        )
        peer = own.get("peer", COLLECTIVE)

        def spec(output: HostArray, x: HostArray) -> CallSpec:
            device = "cpu" if type(output) is np.ndarray else "cuda"
            values = arguments(output, x)

            def run(communicator: Communicator, call: Call) -> object:
                return getattr(communicator, method)(call, *values)

            return CallSpec(kind, run, *header, device, peer)

        return spec

    def direct(self, x: jax.ShapeDtypeStruct) -> DirectCall | None:
        carrier, peer = self.carrier, vars(self).get("peer", COLLECTIVE)
        if not self.is_direct:
            return None
        operand = host_struct(x, self.operand_has_rows)
        result = host_struct(self.result(x), self.result_has_rows)
        spec, clears = self.call_spec(x), not self.has_result
        return DirectCall(
            carrier, spec, operand, result, peer, self.in_place, clears, self.only_sends
        )

    def host_side(self, x: jax.ShapeDtypeStruct) -> HostSide:
        """Return a function that makes the call. If ``in_place``, its two arrays are one."""
        spec, has_result = self.call_spec(x), self.has_result
        issue = call_queue_of(self.carrier).issue

        def call(output: HostArray, x: HostArray) -> None:
            issue(spec(output, x))
            if not has_result:
                output.fill(0)

        return call

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        call = self.host_side(x)
        if self.only_sends:
            return lambda _, inputs, __: call(inputs[0], inputs[0])
        if self.in_place:
            return lambda outputs, _, __: call(outputs[0], outputs[0])
        return lambda outputs, inputs, _: call(outputs[0], inputs[0])

    @property
    def _size(self) -> int:
        return len(self.group.ranks)


@dataclass(frozen=True)
class SameShape(Issuing):
    """A collective from (…) to (…), in place."""

    in_place = True


@dataclass(frozen=True)
class _MembersToOne(Issuing):
    """A collective from (size, …) to (…)."""

    operand_has_rows = True

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        return jnp.moveaxis(x, dim, 1), 0


@dataclass(frozen=True)
class _OneToMembers(Issuing):
    """A collective from (…) to (size, …)."""

    result_has_rows = True

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._size, *x.shape), x.dtype)

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        return x, dim + 1


@dataclass(frozen=True)
class AllReduce(SameShape):
    """A reduction whose result all members get."""

    kind = Kind.ALL_REDUCE
    op: ReduceOp
    of_one_loss: bool = False
    """True if all members compute one loss: the transpose is the identity, not a sum of losses."""

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), self.op

    def transposed(self) -> InJit | None:
        if self.of_one_loss:
            return _Identity(self.group)
        return self if self.op.kind in _LINEAR else None

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        if self.op.kind in _LINEAR:
            return bind(self, t)
        if self.op.kind is RedOpType.PRODUCT:
            gather = AllGather(self.group)

            def product(rows: jax.Array) -> jax.Array:
                return jnp.prod(rows, axis=0)

            return jax.jvp(product, (bind(gather, x),), (bind(gather, t),))[1]
        # MIN, MAX: the members that hold the extreme value share equally, as in jax.numpy.
        holds = (x == y).astype(t.dtype)
        total = AllReduce(self.group, ReduceOp.SUM)
        return bind(total, t * holds) / bind(total, holds)


@dataclass(frozen=True)
class _Identity(InJit):
    """The transpose of an ``AllReduce`` of one loss: every member has the whole cotangent."""

    makes_call = False

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        raise AssertionError("the identity makes no call")

    def transposed(self) -> InJit:
        return AllReduce(self.group, ReduceOp.SUM, of_one_loss=True)


@dataclass(frozen=True)
class Broadcast(SameShape):
    """A broadcast of the root's array."""

    kind = Kind.BROADCAST
    root: int

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), self.root

    def transposed(self) -> InJit:
        return Reduce(self.group, self.root, ReduceOp.SUM)


@dataclass(frozen=True)
class Reduce(SameShape):
    """A reduction whose result the root gets; the other members get zeros."""

    kind = Kind.REDUCE
    root: int
    op: ReduceOp

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), self.op, self.root

    @property
    def has_result(self) -> bool:
        return self.group.rank() == self.root

    def transposed(self) -> InJit | None:
        return Broadcast(self.group, self.root) if self.op.kind is RedOpType.SUM else None

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        if self.op.kind is RedOpType.SUM:
            return bind(self, t)
        whole = AllReduce(self.group, self.op)
        tangent = whole.tangent(x, bind(Broadcast(self.group, self.root), y), t)
        # Not a Python `if`: the transposed call needs all members.
        return jnp.where(self.group.rank() == self.root, tangent, 0)


@dataclass(frozen=True)
class AllGather(_OneToMembers):
    """A gather of all members' arrays to all members."""

    kind = Kind.ALL_GATHER
    counts_result = True

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return _rows(output), flat_of(x)

    def transposed(self) -> InJit:
        return ReduceScatter(self.group, ReduceOp.SUM)


@dataclass(frozen=True)
class ReduceScatter(_MembersToOne):
    """A reduction of all members' rows i, which member i gets."""

    kind = Kind.REDUCE_SCATTER
    op: ReduceOp

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), _rows(x), self.op

    def transposed(self) -> InJit | None:
        if self.op.kind is RedOpType.AVG:
            return _AveragingGather(self.group)
        return AllGather(self.group) if self.op.kind is RedOpType.SUM else None

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        if self.op.kind in _LINEAR:
            return bind(self, t)
        whole = AllReduce(self.group, self.op)
        return whole.tangent(x, bind(AllGather(self.group), y), t)[self.group.rank()]


@dataclass(frozen=True)
class _AveragingGather(AllGather):
    """The transpose of an averaging reduce-scatter: a gather, divided by the number of members."""

    is_direct = False

    def host_side(self, x: jax.ShapeDtypeStruct) -> HostSide:
        gather, size = super().host_side(x), self._size

        def call(output: HostArray, x: HostArray) -> None:
            gather(output, x)
            ReduceOp.AVG.finish(output.reshape(-1), size)

        return call

    def transposed(self) -> InJit:
        return ReduceScatter(self.group, ReduceOp.AVG)


@dataclass(frozen=True)
class Gather(_OneToMembers):
    """A gather of all members' arrays to the root; the other members get zeros."""

    kind = Kind.GATHER
    agreed: ClassVar[bool] = False
    root: int

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        outputs = _rows(output) if self.has_result else None
        return outputs, flat_of(x), self.root

    @property
    def has_result(self) -> bool:
        return self.group.rank() == self.root

    def transposed(self) -> InJit:
        return Scatter(self.group, self.root)


@dataclass(frozen=True)
class Scatter(_MembersToOne):
    """A scatter of the root's row i to member i."""

    kind = Kind.SCATTER
    agreed: ClassVar[bool] = False
    counts_result: ClassVar[bool] = True
    root: int

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        inputs = _rows(x) if self.group.rank() == self.root else None
        return flat_of(output), inputs, self.root

    def transposed(self) -> InJit:
        return Gather(self.group, self.root)


@dataclass(frozen=True)
class AllToAll(Issuing):
    """An exchange in which member j's row i becomes member i's row j."""

    kind = Kind.ALL_TO_ALL
    agreed: ClassVar[bool] = False
    operand_has_rows = result_has_rows = True

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return _rows(output), _rows(x)

    def transposed(self) -> InJit:
        return self

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        return jnp.moveaxis(x, dim, 1), 1


@dataclass(frozen=True)
class ScanExchange(AllToAll):
    """One of the two exchanges of a ``scan``, which checks the members' ops and sizes."""

    agreed: ClassVar[bool] = True
    op: ReduceOp
