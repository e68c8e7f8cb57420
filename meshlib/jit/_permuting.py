"""``permute``, in one call or two, and the exchange of ghost cells built on it."""

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
    """A move of each source's array to its destination; members without a source get zeros.

    All members make one call, an all-to-all with at most one part each way. Its header carries a
    hash of the pairs and ``tag``, which detects members that disagree.
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
    """A started permute. It has its own memory, because XLA may move or free its buffers."""

    work: Work[Any]
    received: HostArray
    program: Program
    break_off: Callable[[BaseException], None]


@dataclass(frozen=True)
class _Half(InJit):
    """The start or the end of the permute ``whole``; ``tag`` connects the two.

    A thread of a derived group makes the call, so that the program continues meanwhile.
    """

    whole: Permute
    tag: int

    in_place = True

    def transposed(self) -> None:
        return None  # tangents use the whole permute

    def issued(self) -> Permute:
        """Return the permute to issue, on the derived group."""
        group = derived_group(self.group, "passing", f"{self.group.group_desc}, passing")
        return replace(self.whole, group=group, tag=self.tag)


@dataclass(frozen=True)
class PermuteStart(_Half):
    """The start of a permute: sends a copy of the operand, and returns the operand at once."""

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        permute = self.issued()
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
    """The end of a permute: returns the received array, in the memory of the operand."""

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        permute = self.issued()
        group, at_once, tag = permute.group, permute.host_side(x), self.tag

        def done(held: HostArray) -> None:
            if type(held) is not np.ndarray:
                # On a GPU the whole permute runs here, on the stream, in order with other work.
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
    """Return the ``x`` of this member's source in ``perm``, zeros without a source.

    ``perm`` lists pairs (source, destination) of *group* ranks, equal on all members. Each rank is
    the source of at most one pair and the destination of at most one. ``x`` may be a pytree, as for
    ``all_reduce``. As ``jax.lax.ppermute``. The transpose is the inverse ``permute``. Raises
    ValueError for wrong pairs.
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
    """A started ``permute``, which ``permute_done`` completes. A pytree."""

    x: jax.Array
    """The operand. Computations that use this array run after the start."""
    halves: tuple[PermuteStart, PermuteDone]


def permute_start(
    x: Any, perm: Iterable[tuple[int, int]], group: Group = None, *, tag: int = 0
) -> PendingPermute:
    """Start a ``permute`` that proceeds while the program computes; ``permute_done`` waits for it.

        passing = mj.permute_start(x, perm, group)
        y = f(passing.x)                            # computed during the permute
        x = mj.permute_done(passing, after=y)       # waits only once y is computed

    ``tag``, 0 to 2**32 - 1, distinguishes permutes that are in flight at the same time. The permute
    sends a copy of ``x`` and receives into new memory, so a rank holds two more arrays meanwhile.
    On a GPU, ``permute_done`` does all the work. The derivative is that of ``permute``.

    If an error of another call ends the program before ``permute_done``, the permute is aborted on
    all members, with that error as the reason.
    """
    x, calls = prepare(x, group)
    pairs = _pairs(perm, calls.size())
    check_tag(tag)
    whole = Permute(calls, pairs)
    halves = PermuteStart(calls, whole, tag), PermuteDone(calls, whole, tag)
    return PendingPermute(x if calls.size() == 1 else bind(halves[0], x), halves)


def permute_done(passing: PendingPermute, after: Any = None) -> jax.Array:
    """Wait for the started permute ``passing``; return the received array.

    The wait begins once the arrays of ``after``, a pytree, have been computed.
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
    """Return ``x`` with its ghost cells filled by the neighbours' cells, as ``mesh.exchange_halo``.

    ``x`` is this rank's block of a larger grid, with ``width`` ghost cells at both ends of each
    axis in ``dims``, such as ``{"y": 0, "x": 1}``: the axis along each dim of ``mesh``. Dims are
    exchanged one after another, which also fills edges and corners. Ghost cells beyond an edge of
    the mesh keep their values, unless the dim is ``periodic`` (one bool, or one for each dim). The
    transpose adds the ghost cells' cotangents to those of the cells that they came from.

    Makes two ``permute`` calls along each dim: all ranks must call it, with blocks of one shape.
    Raises ValueError for a ``width`` below 1, for a wrong axis, for an axis with fewer than
    ``3 * width`` cells, and on a rank outside of the mesh. Raises MeshDimError (a ValueError) for
    an unknown dim.
    """
    x = jnp.asarray(x)
    for dim, axis, is_ring in check_halo(mesh, x.shape, dims, width, periodic):
        before, behind = mesh.shift(dim, periodic=is_ring)
        size, length = mesh[dim].size(), x.shape[axis]
        up = [(i, (i + 1) % size) for i in range(size if is_ring else size - 1)]
        down = [(above, below) for below, above in up]
        # Faces of later axes include the ghost cells of earlier ones, which fills the corners.
        for perm, source, inner, ghosts in (
            (up, before, length - 2 * width, 0),
            (down, behind, width, length - width),
        ):
            if perm:  # all members of the group call, even those that receive nothing
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
