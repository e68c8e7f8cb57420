"""``permute``, whole and in two halves, and the exchange of ghost cells that is made of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshlib._calls.work import Work
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._collectives.point_to_point import check_tag
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import Group, derived_group
from meshlib._mesh.device_mesh import DeviceMesh
from meshlib._mesh.names import DimKey
from meshlib._mesh.neighbours import check_halo
from meshlib.jit._arguments import in_one_call, is_tree, prepare
from meshlib.jit._collective import InJit, bind
from meshlib.jit._kinds import Issuing, flat_of
from meshlib.jit._xla.program import HostArray, HostFunction, Program, state_in_jit
from transport._calls.header import Kind


@dataclass(frozen=True)
class Permute(Issuing):
    """Each pair (source, destination) moves one member's array; other destinations get zeros.

    All members make one call, an all-to-all with at most one part each way. Its header carries a
    hash of the pairs and of ``tag``, so that a member with different ones is detected.
    """

    kind = Kind.ALL_TO_ALL
    pairs: tuple[tuple[int, int], ...]
    tag: int = 0

    @cached_property
    def source(self) -> int | None:
        """The member that sends its array to this one; None for zeros."""
        me = self.group.rank()
        return next((here for here, there in self.pairs if there == me), None)

    @cached_property
    def _destination(self) -> int | None:
        me = self.group.rank()
        return next((there for here, there in self.pairs if here == me), None)

    @property
    def has_result(self) -> bool:
        return self.source is not None

    @property
    def extra(self) -> int:
        return zlib.crc32(repr((self.tag, sorted(self.pairs))).encode())

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        size, flat = self._size, flat_of(x)
        outputs, inputs = [flat[:0]] * size, [flat[:0]] * size
        if self._destination is not None:
            inputs[self._destination] = flat
        if self.source is not None:
            outputs[self.source] = flat_of(output)
        return outputs, inputs

    def transposed(self) -> InJit:
        return Permute(self.group, tuple((there, here) for here, there in self.pairs))


class _StartedPermute(NamedTuple):
    """A permute that was begun. It has its own memory, because XLA may move or free its buffers."""

    work: Work[Any]
    received: HostArray
    program: Program
    break_off: Callable[[BaseException], None]


@dataclass(frozen=True)
class _Half(InJit):
    """A half of ``whole``; both halves of one permute have the same ``tag``.

    A derived group makes the call. It proceeds on that group's thread, while the program goes on.
    """

    whole: Permute
    tag: int

    in_place = True

    def transposed(self) -> None:
        return None  # a tangent has no halves

    def beside(self) -> Permute:
        """Return the permute that is made."""
        group = derived_group(self.group, "passing", f"{self.group.group_desc}, passing")
        return replace(self.whole, group=group, tag=self.tag)


@dataclass(frozen=True)
class PermuteStart(_Half):
    """Sends a copy of its operand, and returns the operand at once."""

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        permute = self.beside()
        group, spec, tag = permute.group, permute.call_spec(x), self.tag

        def start(held: HostArray, program: Program) -> None:
            if type(held) is not np.ndarray:
                return  # see PermuteDone
            under_way = state_in_jit(group).under_way
            before = under_way.get(tag)
            if before is not None:
                before.break_off(
                    RuntimeError(f"no permute_done came before the next start, tag {tag}")
                )
            received = np.empty_like(held)
            work: Work[Any] = call_queue_of(group).issue(spec(received, held.copy()), async_op=True)
            under_way[tag] = _StartedPermute(work, received, program, break_off)
            program.guard(break_off)

        def break_off(error: BaseException) -> None:
            _taken(group, tag)
            group.abort(f"a permute under way was broken off by {type(error).__name__}: {error}")

        return lambda outputs, _, program: start(outputs[0], program)

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        del x, y
        return t


@dataclass(frozen=True)
class PermuteDone(_Half):
    """Returns the received array, in the memory of its operand, which was sent."""

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        permute = self.beside()
        group, at_once, tag = permute.group, permute.host_side(x), self.tag

        def done(held: HostArray) -> None:
            if type(held) is not np.ndarray:
                # On a GPU the stream keeps the order, and the host is far ahead of it.
                at_once(held, held.copy())
                return
            under_way = _taken(group, tag)
            under_way.work.wait()
            held[...] = 0 if permute.source is None else under_way.received

        return lambda outputs, _, __: done(outputs[0])

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        del x, y
        return bind(self.whole, t)


def _taken(group: ProcessGroup, tag: int) -> _StartedPermute:
    """Remove and return the permute under way with ``tag``; RuntimeError if there is none."""
    under_way: _StartedPermute | None = state_in_jit(group).under_way.pop(tag, None)
    if under_way is None:
        raise RuntimeError(f"permute_done with tag {tag}, but no permute_start before it: {group}")
    under_way.program.unguard(under_way.break_off)
    return under_way


def permute(x: Any, perm: Iterable[tuple[int, int]], group: Group = None) -> Any:
    """Return the ``x`` of the member that ``perm`` pairs with this one; zeros if there is none.

    ``perm`` has pairs (source, destination) of *group* ranks, each rank at most once as either,
    equal on all members. ``x`` may be a pytree, as for ``all_reduce``. As ``jax.lax.ppermute``. The
    transpose is the inverse ``permute``.
    """
    perm = list(perm)
    if is_tree(x):
        return in_one_call(lambda flat: permute(flat, perm, group), x, group)
    x, calls = prepare(x, group)
    pairs = _pairs(perm, calls.size())
    if calls.size() == 1:
        return x if pairs else jnp.zeros_like(x)
    return bind(Permute(calls, pairs), x)


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["halves"])
@dataclass(frozen=True)
class PendingPermute:
    """A ``permute`` that was begun: ``permute_done`` ends it. A pytree."""

    x: jax.Array
    """The operand after the start: the program computes anything that uses it after the start."""
    halves: tuple[PermuteStart, PermuteDone]


def permute_start(
    x: Any, perm: Iterable[tuple[int, int]], group: Group = None, *, tag: int = 0
) -> PendingPermute:
    """Begin a ``permute``, and compute meanwhile: ``permute_done`` waits for it.

        passing = mj.permute_start(x, perm, group)
        y = f(passing.x)                            # x, and computed after the start
        x = mj.permute_done(passing, after=y)       # not waited for before y is there

    ``tag``, 0 to 2**32 - 1, tells permutes apart that are under way at the same time, one for each
    tag. The permute sends a copy of ``x`` and receives into new memory, so a rank holds two more
    arrays meanwhile. On a GPU, ``permute_done`` does all the work. The derivative is that of one
    whole ``permute``.

    If the program ends between the two by an error of another call, the permute is aborted on all
    members, with that error as the reason.
    """
    x, calls = prepare(x, group)
    pairs = _pairs(perm, calls.size())
    check_tag(tag)
    whole = Permute(calls, pairs)
    halves = PermuteStart(calls, whole, tag), PermuteDone(calls, whole, tag)
    return PendingPermute(x if calls.size() == 1 else bind(halves[0], x), halves)


def permute_done(passing: PendingPermute, after: Any = None) -> jax.Array:
    """Return the result of ``permute``, begun by ``passing``.

    Waits for it when the arrays of ``after``, a pytree, have been computed.
    """
    half = passing.halves[1]
    if half.group.size() == 1:
        return passing.x if half.whole.pairs else jnp.zeros_like(passing.x)
    return bind(half, passing.x, anchors=jax.tree_util.tree_leaves(after))


def exchange_halo(
    x: Any,
    mesh: DeviceMesh,
    dims: Mapping[DimKey, int],
    width: int = 1,
    *,
    periodic: bool | Mapping[DimKey, bool] = False,
) -> jax.Array:
    """Return ``x`` with its ghost cells filled by the neighbours' cells: ``mesh.exchange_halo``.

    ``x`` is this rank's block of a larger grid, with ``width`` ghost cells at both ends of each
    axis in ``dims``, such as ``{"y": 0, "x": 1}``: the axis along each dim of ``mesh``. The dims
    take turns, so edges and corners are filled, too. Beyond an edge of the mesh ghost cells keep
    their values, unless the dim is ``periodic`` (one bool, or one for each dim). The transpose adds
    the ghost cells' cotangents to those of the cells that they came from.

    Two calls along each dim, ``permute``: all ranks make them, with blocks of one shape.
    Raises ValueError for a ``width`` below 1, for a wrong axis, for an axis with fewer than
    ``3 * width`` cells, and on a rank outside; MeshDimError (a ValueError) for an unknown dim.
    """
    x = jnp.asarray(x)
    for dim, axis, is_ring in check_halo(mesh, x.shape, dims, width, periodic):
        before, behind = mesh.shift(dim, periodic=is_ring)
        size, length = mesh[dim].size(), x.shape[axis]
        up = [(i, (i + 1) % size) for i in range(size if is_ring else size - 1)]
        down = [(above, below) for below, above in up]
        # Faces of the second axis contain ghost cells of the first one: so corners come.
        for perm, source, inner, ghosts in (
            (up, before, length - 2 * width, 0),
            (down, behind, width, length - width),
        ):
            if perm:  # all members of the group call, also those that nothing comes to
                face = jax.lax.slice_in_dim(x, inner, inner + width, axis=axis)
                face = permute(face, perm, mesh[dim])
                if source is not None:
                    x = jax.lax.dynamic_update_slice_in_dim(x, face, ghosts, axis)
    return x


def _pairs(perm: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    pairs = tuple((int(source), int(destination)) for source, destination in perm)
    for name, ranks in (
        ("sources", [source for source, _ in pairs]),
        ("destinations", [destination for _, destination in pairs]),
    ):
        strange = [rank for rank in ranks if not 0 <= rank < size]
        if strange:
            raise ValueError(f"perm has {name} {strange}; expected group ranks 0 to {size - 1}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"perm has {name} more than once: {ranks}")
    return pairs
