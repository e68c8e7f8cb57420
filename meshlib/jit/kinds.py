"""The collectives inside ``jax.jit``: result, host side, transpose and batching of each.

Ranks are group ranks here. What is gathered or scattered has the members along dim 0; the public
functions move dims where the user wants them.
"""
# ruff: noqa: D102 (the methods are those of InJit, which documents them)

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from meshlib.device_arrays import device_flat
from meshlib.jit.collective import InJit, bind, front
from meshlib.jit.host_call import HostArray
from transport.call import NO_ROOT, Call, Kind, dtype_code
from transport.communicator import Communicator
from transport.reduce_op import RedOpType, ReduceOp

_LINEAR = (RedOpType.SUM, RedOpType.AVG)


def _flat(array: HostArray) -> HostArray:
    """Return the buffer that communicators take, over the memory of ``array``."""
    if _device(array) == "cuda":
        # In the place of NumPy's, which has its attributes and slices alike.
        return cast(HostArray, device_flat(array))
    return array.reshape(-1)


def _rows(array: HostArray) -> list[HostArray]:
    """Return a buffer for each of the rows of ``array``."""
    flat, rows = _flat(array), len(array)
    size = flat.size // rows if rows else 0
    return [flat[i * size : (i + 1) * size] for i in range(rows)]


def _device(array: HostArray) -> str:
    return "cuda" if hasattr(array, "__cuda_array_interface__") else "cpu"


@dataclass(frozen=True)
class _Issuing(InJit):
    """What is common to calls of all members."""

    def _issue(
        self, kind: Kind, run: Any, x: HostArray, elements: int, op: int = 0, root: int = NO_ROOT
    ) -> None:
        self.group.issue(
            kind,
            run,
            device=_device(x),
            elements=elements,
            dtype=dtype_code(x.dtype),
            op=op,
            root=root,
            nbytes=x.nbytes,
        )

    @property
    def _size(self) -> int:
        return len(self.group.ranks)


@dataclass(frozen=True)
class _SameShape(_Issuing):
    in_place = True

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x


@dataclass(frozen=True)
class _MembersToOne(_Issuing):
    """From (size, …) to (…)."""

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        return bind(self, front(x, dim, 1)), 0


@dataclass(frozen=True)
class _OneToMembers(_Issuing):
    """From (…) to (size, …)."""

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._size, *x.shape), x.dtype)

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        return bind(self, x), dim + 1


@dataclass(frozen=True)
class AllReduce(_SameShape):
    """All members get the reduction of all."""

    op: ReduceOp

    def run(self, output: HostArray, x: HostArray) -> None:
        flat, op = _flat(output), self.op

        def run(communicator: Communicator, call: Call) -> None:
            communicator.all_reduce(call, flat, op)

        self._issue(Kind.ALL_REDUCE, run, output, flat.size, op.code)

    def transposed(self) -> InJit | None:
        return self if self.op.kind in _LINEAR else None

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        if self.op.kind in _LINEAR:
            return bind(self, t)
        if self.op.kind is RedOpType.PRODUCT:
            gather = AllGather(self.group)

            def product(rows: jax.Array) -> jax.Array:
                return jnp.prod(rows, axis=0)

            return jax.jvp(product, (bind(gather, x),), (bind(gather, t),))[1]
        # MIN, MAX: whoever holds the extreme value; several holders share, as in jax.numpy.
        holds = (x == y).astype(t.dtype)
        total = AllReduce(self.group, ReduceOp.SUM)
        return bind(total, t * holds) / bind(total, holds)


@dataclass(frozen=True)
class Broadcast(_SameShape):
    """All members get the root's."""

    root: int

    def run(self, output: HostArray, x: HostArray) -> None:
        flat, root = _flat(output), self.root

        def run(communicator: Communicator, call: Call) -> None:
            communicator.broadcast(call, flat, root)

        self._issue(Kind.BROADCAST, run, output, flat.size, root=root)

    def transposed(self) -> InJit:
        return Reduce(self.group, self.root)


@dataclass(frozen=True)
class Reduce(_SameShape):
    """The root gets the sum, the others zeros."""

    root: int

    def run(self, output: HostArray, x: HostArray) -> None:
        flat, root = _flat(output), self.root

        def run(communicator: Communicator, call: Call) -> None:
            communicator.reduce(call, flat, ReduceOp.SUM, root)

        self._issue(Kind.REDUCE, run, output, flat.size, ReduceOp.SUM.code, root)
        if self.group.rank() != root:
            output.fill(0)

    def transposed(self) -> InJit:
        return Broadcast(self.group, self.root)


@dataclass(frozen=True)
class AllGather(_OneToMembers):
    """All members get everybody's."""

    def run(self, output: HostArray, x: HostArray) -> None:
        outputs, flat = _rows(output), _flat(x)

        def run(communicator: Communicator, call: Call) -> None:
            communicator.all_gather(call, outputs, flat)

        self._issue(Kind.ALL_GATHER, run, output, output.size)

    def transposed(self) -> InJit:
        return ReduceScatter(self.group, ReduceOp.SUM)


@dataclass(frozen=True)
class ReduceScatter(_MembersToOne):
    """Member i gets the reduction of everybody's row i."""

    op: ReduceOp

    def run(self, output: HostArray, x: HostArray) -> None:
        flat, inputs, op = _flat(output), _rows(x), self.op

        def run(communicator: Communicator, call: Call) -> None:
            communicator.reduce_scatter(call, flat, inputs, op)

        self._issue(Kind.REDUCE_SCATTER, run, x, x.size, op.code)

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
class _AveragingGather(_OneToMembers):
    """The transpose of an averaging reduce-scatter: a gather, divided by the number of members."""

    def run(self, output: HostArray, x: HostArray) -> None:
        AllGather(self.group).run(output, x)
        ReduceOp.AVG.finish(output.reshape(-1), self._size)

    def transposed(self) -> InJit:
        return ReduceScatter(self.group, ReduceOp.AVG)


@dataclass(frozen=True)
class Gather(_OneToMembers):
    """The root gets everybody's, the others zeros."""

    root: int

    def run(self, output: HostArray, x: HostArray) -> None:
        flat, root = _flat(x), self.root
        outputs = _rows(output) if self.group.rank() == root else None
        if outputs is None:
            output.fill(0)

        def run(communicator: Communicator, call: Call) -> None:
            communicator.gather(call, outputs, flat, root)

        self._issue(Kind.GATHER, run, x, 0, root=root)

    def transposed(self) -> InJit:
        return Scatter(self.group, self.root)


@dataclass(frozen=True)
class Scatter(_MembersToOne):
    """Member i gets the root's row i."""

    root: int

    def run(self, output: HostArray, x: HostArray) -> None:
        flat, root = _flat(output), self.root
        inputs = _rows(x) if self.group.rank() == root else None

        def run(communicator: Communicator, call: Call) -> None:
            communicator.scatter(call, flat, inputs, root)

        self._issue(Kind.SCATTER, run, output, 0, root=root)

    def transposed(self) -> InJit:
        return Gather(self.group, self.root)


@dataclass(frozen=True)
class AllToAll(_Issuing):
    """Member j's row i becomes member i's row j."""

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x

    def run(self, output: HostArray, x: HostArray) -> None:
        outputs, inputs = _rows(output), _rows(x)

        def run(communicator: Communicator, call: Call) -> None:
            communicator.all_to_all(call, outputs, inputs)

        self._issue(Kind.ALL_TO_ALL, run, x, 0)

    def transposed(self) -> InJit:
        return self

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        return bind(self, front(x, dim, 1)), 1


@dataclass(frozen=True)
class Permute(_Issuing):
    """Each pair (source, destination) moves one member's array; who gets none gets zeros.

    One call of all members, as an all-to-all with at most one part each way: it needs no tags, and
    its header carries a hash of the pairs, so that members with other pairs are found out.
    """

    pairs: tuple[tuple[int, int], ...]

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x

    def run(self, output: HostArray, x: HostArray) -> None:
        me, nothing = self.group.rank(), _flat(x)[:0]
        outputs, inputs = [nothing] * self._size, [nothing] * self._size
        for source, destination in self.pairs:
            if source == me:
                inputs[destination] = _flat(x)
            if destination == me:
                outputs[source] = _flat(output)
        if all(part.size == 0 for part in outputs):
            output.fill(0)

        def run(communicator: Communicator, call: Call) -> None:
            communicator.all_to_all(call, outputs, inputs)

        self.group.issue(
            Kind.ALL_TO_ALL,
            run,
            device=_device(x),
            elements=x.size,
            dtype=dtype_code(x.dtype),
            extra=zlib.crc32(repr(sorted(self.pairs)).encode()),
            nbytes=x.nbytes,
        )

    def transposed(self) -> InJit:
        return Permute(self.group, tuple((there, here) for here, there in self.pairs))


@dataclass(frozen=True)
class Send(_SameShape):
    """Sends the operand to ``peer``, and returns it."""

    peer: int
    tag: int

    def run(self, output: HostArray, x: HostArray) -> None:
        flat, peer, tag = _flat(output), self.peer, self.tag

        def run(communicator: Communicator, call: Call) -> None:
            communicator.send(call, flat, peer, tag)

        _point_to_point(self, Kind.SEND, run, output)

    def transposed(self) -> InJit:
        return _ReceiveAndAdd(self.group, self.peer, self.tag)


@dataclass(frozen=True)
class Receive(_SameShape):
    """Receives from ``peer``; the operand is a template whose values do not matter."""

    peer: int
    tag: int

    def run(self, output: HostArray, x: HostArray) -> None:
        flat, peer, tag = _flat(output), self.peer, self.tag

        def run(communicator: Communicator, call: Call) -> None:
            communicator.recv(call, flat, peer, tag)

        _point_to_point(self, Kind.RECV, run, output)

    def transposed(self) -> InJit:
        return _SendAndForget(self.group, self.peer, self.tag)


@dataclass(frozen=True)
class _ReceiveAndAdd(_SameShape):
    """The transpose of a send, whose operand goes two ways: to its result and to the peer."""

    peer: int
    tag: int

    def run(self, output: HostArray, x: HostArray) -> None:
        received = np.empty_like(output)
        Receive(self.group, self.peer, self.tag).run(received, received)
        output += received

    def transposed(self) -> InJit:
        return Send(self.group, self.peer, self.tag)


@dataclass(frozen=True)
class _SendAndForget(_SameShape):
    """The transpose of a receive: the cotangent goes to the peer, nothing to the template."""

    peer: int
    tag: int

    def run(self, output: HostArray, x: HostArray) -> None:
        Send(self.group, self.peer, self.tag).run(output, x)
        output.fill(0)

    def transposed(self) -> InJit:
        return Receive(self.group, self.peer, self.tag)


def _point_to_point(call: Send | Receive, kind: Kind, run: Any, array: HostArray) -> None:
    call.group.issue(
        kind,
        run,
        device=_device(array),
        elements=array.size,
        dtype=dtype_code(array.dtype),
        extra=call.tag,
        peer=call.peer,
        nbytes=array.nbytes,
    )


def barrier(group: Any) -> Any:
    """Return the host side of a barrier."""

    def run(communicator: Communicator, call: Call) -> None:
        communicator.barrier(call)

    def at_barrier(outputs: Sequence[HostArray], inputs: Sequence[HostArray], _: Any) -> None:
        group.issue(Kind.BARRIER, run)

    return at_barrier
