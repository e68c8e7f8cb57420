"""The parameters of one ``fully_shard`` call, which are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlib import DeviceMesh, ProcessGroup
from meshlib.sharding import Sharding
from parallel._arrays import Array, is_floating, namespace, placement
from parallel._core.shards import GradientBuffer, GradientReduction, Pool, ShardGather, rows_of
from parallel._groups import same_dims
from parallel.nn._parameter import GlobalPart, Parameter
from parallel.nn._precision import MixedPrecisionPolicy


class ParameterShard(GlobalPart):
    """This rank's shard of ``parameter``: dim 0, split over the last dim of ``mesh``.

    ``parameter.data`` and ``grad`` are those of the shard or, between ``lend`` and ``take_back``,
    of the whole parameter, of shape ``whole_shape``. Meanwhile ``part_grad`` holds the shard's
    gradient. Otherwise ``pending`` holds the gradient of the whole parameter before its reduction.
    """

    def __init__(self, parameter: Parameter, mesh: DeviceMesh, group: ParameterGroup) -> None:
        self.parameter = parameter
        self.group = group
        whole = parameter.data
        self.whole_shape: tuple[int, ...] = tuple(whole.shape)
        self._split = parameter.global_part
        self._lend_from: Array | None = None
        self._place(mesh, namespace(whole).array(whole[self._rows(mesh)], order="C"))

    def _place(self, mesh: DeviceMesh, array: Array) -> None:
        """Store ``array`` as the shard on ``mesh``, without a gradient."""
        super().__init__(*self._global_layout(mesh))
        self.part_grad: Array | None = None
        self.pending: Array | None = None
        parameter = self.parameter
        parameter.grad_home = parameter.grad = None
        parameter.data = array
        parameter.global_part = self

    def _global_layout(self, mesh: DeviceMesh) -> tuple[Sharding, tuple[int, ...]]:
        """Return the sharding with dim 0 split over ``mesh``, and the parameter's global shape.

        If a tensor parallel layer has split the parameter already, the sharding has the dims of
        both meshes. Dim 0 is split by the layer's dims first, then by the last dim of ``mesh``.
        """
        last, outer = mesh.ndim - 1, self._split
        if outer is None:
            return Sharding.of_positions(mesh, [(last,)]), self.whole_shape
        both = DeviceMesh.concatenate([mesh, outer.sharding.mesh])
        dims = [tuple(i + mesh.ndim for i in dim) for dim in outer.sharding.dims] or [()]
        dims[0] = (*dims[0], last)
        return Sharding.of_positions(both, dims), outer.shape

    def _rows(self, mesh: DeviceMesh) -> slice:
        last = mesh.ndim - 1
        return rows_of(self.whole_shape, mesh.shape[last], mesh.get_local_rank(last))

    def move_to(self, mesh: DeviceMesh) -> None:
        """Become this rank's shard on another mesh.

        A shard of another size becomes zero; the caller must fill in the values.
        """
        old, rows = self.array, self._rows(mesh)
        height = rows.stop - rows.start
        # A rank that has just joined was the only shard, with the whole parameter.
        part = namespace(old).array(old[rows], order="C") if old.shape == self.whole_shape else old
        if part.shape[0] != height:
            part = namespace(old).zeros((height, *self.whole_shape[1:]), dtype=old.dtype)
        self._place(mesh, part)

    @property
    def array(self) -> Array:
        """The shard."""
        return self.parameter.data if self._lend_from is None else self._lend_from

    @property
    def lent(self) -> bool:
        """True if modules compute with the whole parameter."""
        return self._lend_from is not None

    def lend(self, whole: Array) -> None:
        """Make ``parameter`` the array ``whole``; modules compute with it and add gradients."""
        parameter = self.parameter
        part = self._lend_from = parameter.data
        parameter.data, parameter.other_grad_dtype = whole, part.dtype
        self.part_grad, parameter.grad = parameter.grad, self.pending
        self.pending = None

    def take_back(self) -> None:
        """Make ``parameter`` the shard again."""
        parameter = self.parameter
        parameter.data, parameter.other_grad_dtype = self._lend_from, None
        self._lend_from = parameter.grad_home = None
        self.pending, parameter.grad = parameter.grad, self.part_grad
        self.part_grad = None

    @property
    def whole_grad(self) -> Array | None:
        """This rank's gradient of the whole parameter, before the reduction."""
        return self.parameter.grad if self.lent else self.pending

    @whole_grad.setter
    def whole_grad(self, grad: Array | None) -> None:
        if self.lent:
            self.parameter.grad = grad
        else:
            self.pending = grad

    def add_grad(self, grad: Array) -> None:
        """Add the reduced ``grad`` to the shard's gradient; ``grad`` may be kept or modified."""
        grad = grad.reshape(self.array.shape).astype(self.array.dtype, copy=False)
        own = self.part_grad if self.lent else self.parameter.grad
        if own is not None:
            own += grad
        elif self.lent:
            self.part_grad = grad
        else:
            self.parameter.grad = grad


class ParameterGroup:
    """Parameters that are sharded over the last dim of ``mesh``, and replicated over the first.

    ``holders`` counts the modules that currently compute with them.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self._spread(mesh)
        self.policy = policy
        self.parts: list[ParameterShard] = [
            ParameterShard(parameter, mesh, self) for parameter in parameters
        ]
        if self.replicas is not None:
            for part in self.parts:
                self.replicas.broadcast(part.array, group_src=0)
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.forward_group: ProcessGroup | None = None
        """The ranks over which to shard from forward to backward; None: all."""
        self.sync = True
        self.all_reduce = True
        self._begin(Pool())

    def _begin(self, pool: Pool) -> None:
        self.pool: Pool = pool
        self.holders: int = 0
        self._gathers: list[tuple[list[int], ShardGather]] = []
        """Gathers in progress, with the indices in ``parts`` of their parameters."""
        self._whole = False
        self._between: list[Array] | None = None
        self._buffers: list[tuple[list[ParameterShard], GradientBuffer]] = []
        """The memory for gradients before their reduction, with their ``parts``."""
        self._reductions: list[tuple[list[ParameterShard], GradientReduction]] = []
        self._not_averaged: list[Array] | None = None

    def _spread(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        last = mesh.ndim - 1
        self.shards: ProcessGroup = mesh[last].process_group
        self.replicas: ProcessGroup | None = mesh[0].process_group if last else None

    def move_to(self, mesh: DeviceMesh) -> None:
        """Continue with the ranks of ``mesh`` along the same dims as before."""
        self._spread(same_dims(self._mesh, mesh, "fully_shard"))
        for part in self.parts:
            part.move_to(self._mesh)

    # ------------------------------------------------------------------ parameters

    def begin_unshard(self) -> None:
        """Start gathering the parameters, unless they are gathered or a gather is in progress."""
        if self._whole or self._gathers:
            return
        between, self._between = self._between, None
        group = self.shards if between is None else self.forward_group
        assert group is not None
        arrays = [part.array for part in self.parts] if between is None else between
        for dtype, places in self._batches(self._computed_dtype):
            shapes = [self.parts[i].whole_shape for i in places]
            gather = ShardGather(shapes, [arrays[i] for i in places], group, dtype, self.pool)
            self._gathers.append((places, gather))

    def unshard(self) -> None:
        """Gather the parameters and wait for them."""
        if self._whole:
            return
        self.begin_unshard()
        for places, gather in self._gathers:
            for i, whole in zip(places, gather.finish(), strict=True):
                self.parts[i].lend(whole)
        self._whole = True

    def reshard(self, *, keep_some: bool = False) -> None:
        """Free the whole parameters; with ``keep_some``, keep the shards over
        ``forward_group``."""
        if not self._whole and self._gathers:  # a prefetch that turned out unnecessary
            for _, gather in self._gathers:
                gather.finish()
        if self._whole:
            if keep_some and self.forward_group is not None:
                size, rank = self.forward_group.size(), self.forward_group.rank()
                self._between = [
                    namespace(part.array).array(
                        part.parameter.data[rows_of(part.whole_shape, size, rank)], order="C"
                    )
                    for part in self.parts
                ]
            for part in self.parts:
                part.take_back()
        for _, gather in self._gathers:
            gather.release()
        self._gathers = []
        self._whole = False

    def forget_between(self) -> None:
        """Drop the shards kept from forward to backward, after parameters may have changed."""
        self._between = None

    # ------------------------------------------------------------------ gradients

    def prepare_backward(self) -> None:
        """Provide memory for the gradients of the whole parameters."""
        if not self._buffers:
            for dtype, places in self._batches(self._own_dtype, self._trained()):
                parts = [self.parts[i] for i in places]
                self._buffers.append((parts, self._new_buffer(parts, dtype)))
        for parts, buffer in self._buffers:
            for part, view in zip(parts, buffer.views, strict=True):
                part.parameter.set_grad_home(view)

    @property
    def is_complete(self) -> bool:
        """True if gradients are pending and no use in forward still lacks its gradient."""
        pending = any(part.whole_grad is not None for part in self.parts)
        return pending and not any(part.parameter.uses for part in self.parts)

    def begin_reduce(self) -> None:
        """Start averaging the gradients over the ranks."""
        reduce_dtype = self.policy.dtype("reduce_dtype")
        for dtype, places in self._batches(self._own_dtype, self._trained()):
            parts = [self.parts[i] for i in places]
            wanted = dtype if reduce_dtype is None or not is_floating(dtype) else reduce_dtype
            offered = [
                pair for pair in self._buffers if pair[0] == parts and pair[1].flat.dtype == wanted
            ]
            if offered:
                self._buffers.remove(offered[0])
            buffer = offered[0][1] if offered else self._new_buffer(parts, wanted)
            buffer.collect([part.whole_grad for part in parts])
            for part in parts:
                part.whole_grad = None
            replicas = self.replicas if self.all_reduce else None
            self._reductions.append((parts, GradientReduction(buffer, self.shards, replicas)))
        self.forget_gradients()

    def _new_buffer(self, parts: Sequence[ParameterShard], dtype: Any) -> GradientBuffer:
        shapes, like = [part.whole_shape for part in parts], parts[0].array
        return GradientBuffer(shapes, like, self.shards, dtype, self.pool)

    def scattered(self) -> None:
        """Wait for the averages over the shards; start those over the replicas."""
        earlier = self._not_averaged or [None] * len(self._reductions)
        results = [
            reduction.scattered(before)
            for (_, reduction), before in zip(self._reductions, earlier, strict=True)
        ]
        self._not_averaged = None
        if self.replicas is not None and not self.all_reduce:
            self._not_averaged, self._reductions = results, []

    def finish_reduce(self) -> None:
        """Wait for the averages, and add them to the gradients of the shards."""
        for parts, reduction in self._reductions:
            for part, grad in zip(parts, reduction.finish(), strict=True):
                part.add_grad(grad)
        self._reductions = []

    def forget_gradients(self) -> None:
        """Drop gradients of whole parameters before their reduction, and their memory."""
        for part in self.parts:
            part.whole_grad = None
            if part.lent:
                part.parameter.set_grad_home(None)
        for _, buffer in self._buffers:
            buffer.release()
        self._buffers = []

    def abandon(self, pool: Pool) -> None:
        """Reset to the state before the first forward, after an error.

        ``pool`` replaces the old memory, which communication may still be using.
        """
        for part in self.parts:
            if part.lent:
                part.take_back()
            part.pending = None
            part.parameter.uses = 0  # the error may have interrupted some uses
        self._begin(pool)

    # ------------------------------------------------------------------ batches

    def _trained(self) -> list[int]:
        return [i for i, part in enumerate(self.parts) if part.parameter.requires_grad]

    def _own_dtype(self, part: ParameterShard) -> np.dtype[Any]:
        return part.array.dtype

    def _computed_dtype(self, part: ParameterShard) -> np.dtype[Any]:
        own, lower = part.array.dtype, self.policy.dtype("param_dtype")
        return own if lower is None or not is_floating(own) else lower

    def _batches(
        self, dtype_of: Any, among: Sequence[int] | None = None
    ) -> list[tuple[np.dtype[Any], list[int]]]:
        """Return (dtype, indices in ``parts``) by dtype and device, the same on all ranks."""
        batches: dict[Any, tuple[np.dtype[Any], list[int]]] = {}
        for i in range(len(self.parts)) if among is None else among:
            dtype = dtype_of(self.parts[i])
            key = dtype.name, placement(self.parts[i].array)
            batches.setdefault(key, (dtype, []))[1].append(i)
        return list(batches.values())
