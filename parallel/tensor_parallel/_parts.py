"""Conversions between whole and split activations, and this rank's parts of parameters.

The conversions are the operators f and g of Shoeybi et al., "Megatron-LM", arXiv:1909.08053,
section 3: f is the identity forward and an all-reduce backward, g the reverse. If sequences are
split, they gather and reduce-scatter instead: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
Parts have equal sizes along ``dim`` (by default the last), in the order of group ranks. The layouts
of activations before and after a module are torch's placements.
"""

from __future__ import annotations

from collections.abc import Callable

from meshlib import DeviceMesh, ProcessGroup
from meshlib.sharding import Partial, Replicate, Shard, Sharding
from parallel._arrays import Array, namespace
from parallel._checks import describe
from parallel._groups import GroupLike, resolve
from parallel.nn._parameter import GlobalPart, Parameter, kept_part

Placement = Shard | Replicate | Partial

Pending = Callable[[], Array]
"""A function that waits for a collective and returns its result."""


def reduce(x: Array, group: ProcessGroup, dim: int | None = None) -> Array:
    """Return this rank's part along ``dim`` of the sum of ``x`` over the group.

    With None, return the whole sum, bitwise equal on all ranks, in place of ``x``, which must be
    contiguous.
    """
    return start_reduce(x, group, dim, async_op=False)()


def start_reduce(
    x: Array, group: ProcessGroup, dim: int | None = None, *, async_op: bool = True
) -> Pending:
    """Start ``reduce``, to overlap it with computation; ``x`` must not change meanwhile.

    Without ``async_op``, the collective runs now, in the caller's thread.
    """
    if group.size() == 1:
        return lambda: x
    if dim is None:
        result, work = x, group.all_reduce(x, async_op=async_op)
    else:
        xp = namespace(x)
        width = part_of_dim(x, group, dim)
        at = dim % x.ndim
        rows = x.reshape(*x.shape[:at], group.size(), width, *x.shape[at + 1 :])
        rows = xp.ascontiguousarray(xp.moveaxis(rows, at, 0))
        result = xp.empty(rows.shape[1:], dtype=x.dtype)
        work = group.reduce_scatter_tensor(result, rows, async_op=async_op)

    def finish() -> Array:
        if async_op:
            work.wait()
        return result

    return finish


def gather(x: Array, group: ProcessGroup, dim: int = -1) -> Array:
    """Concatenate the ranks' ``x`` along ``dim``; the result is the same on every rank."""
    return start_gather(x, group, dim, async_op=False)()


def split(x: Array, group: ProcessGroup, dim: int = -1) -> Array:
    """Return this rank's part of ``x`` along ``dim``, as a contiguous array."""
    if group.size() == 1:
        return x
    return namespace(x).ascontiguousarray(own_part(x, group, dim))


def own_part(x: Array, group: ProcessGroup, dim: int) -> Array:
    """Return this rank's part of ``x`` along ``dim``, as a view."""
    width = part_of_dim(x, group, dim)
    begin = group.rank() * width
    index = [slice(None)] * x.ndim
    index[dim] = slice(begin, begin + width)
    return x[tuple(index)]


def part_of_dim(x: Array, group: ProcessGroup, dim: int) -> int:
    """Return the size of a rank's part of ``x`` along ``dim``.

    Raises ValueError if ``x`` has no such dim, or it is not divisible by the number of ranks.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"an activation of shape {list(x.shape)} has no dim {dim} to split")
    which = "last dim" if dim % x.ndim == x.ndim - 1 else f"dim {dim}"
    return part_size(x.shape[dim], group, f"the {which} of an activation of shape {list(x.shape)}")


def part_size(total: int, group: ProcessGroup, what: str) -> int:
    """Return ``total`` / size; raise ValueError, naming ``what``, if it is not an integer."""
    width, rest = divmod(total, group.size())
    if rest:
        raise ValueError(
            f"{what} is {total}, which is not divisible by the {group.size()} ranks of {group}"
        )
    return width


def start_gather(x: Array, group: ProcessGroup, dim: int = -1, *, async_op: bool = True) -> Pending:
    """Start ``gather``, to overlap it with computation, like ``start_reduce``."""
    size = group.size()
    if size == 1:
        return lambda: x
    xp = namespace(x)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"an activation of shape {list(x.shape)} has no dim {dim} to gather")
    parts = xp.empty((size, *x.shape), dtype=x.dtype)
    source = xp.ascontiguousarray(x)
    work = group.all_gather_into_tensor(parts, source, async_op=async_op)

    def finish() -> Array:
        if async_op:
            work.wait()
        if dim % x.ndim == 0:
            return parts.reshape(-1, *x.shape[1:])
        return xp.concatenate(list(parts), axis=dim)

    return finish


def sequence_dim(layout: object, name: str) -> int | None:
    """Return the dim of a ``Shard``, or None if ``layout`` is ``Replicate`` or None.

    Raises TypeError, naming ``name``, for any other value.
    """
    if isinstance(layout, Shard):
        return layout.dim
    if layout is None or isinstance(layout, Replicate):
        return None
    raise TypeError(f"{name} must be Replicate() or Shard(dim), got {describe(layout)}")


def features_split(layout: object, name: str) -> bool:
    """Return True if ``layout`` has split features (None), False if it is ``Replicate``.

    Raises TypeError, naming ``name``, for another value.
    """
    if layout is not None and not isinstance(layout, Replicate):
        raise TypeError(
            f"{name} must be Replicate(), or None for split features, got {describe(layout)}"
        )
    return layout is None


class Parts:
    """The split of a model's parameters over the ranks of ``mesh``.

    Raises TypeError for a value that is not a set of ranks, ValueError if it lacks this rank.
    """

    def __init__(self, mesh: GroupLike | None) -> None:
        self.group: ProcessGroup = resolve(mesh, "mesh")
        self.mesh: DeviceMesh | None = mesh if isinstance(mesh, DeviceMesh) else None
        self._dims: dict[Parameter, int | None] = {}

    def check(self, parameter: Parameter, dim: int | None, size: int, what: str) -> None:
        """Raise ValueError if ``parameter`` cannot be cut along ``dim``.

        ``size``, which the message calls ``what``, must be divisible by the number of ranks.
        """
        if dim is not None:
            part_size(size, self.group, what)
        if kept_part(parameter) is not None:
            raise ValueError(
                f"{what} belongs to a parameter that fully_shard has split; expected parallelize"
                " first, then fully_shard"
            )
        if parameter.global_part is not None and parameter not in self._dims:
            raise ValueError(f"{what} belongs to a parameter that is split already")

    def cut(self, parameter: Parameter, dim: int | None) -> None:
        """Replace the parameter's array by a copy of this rank's part along ``dim``.

        None: keep the whole array, the same on all ranks. A parameter that modules share is cut
        only once; raises ValueError if it was cut along another dim.
        """
        if parameter in self._dims:
            if self._dims[parameter] != dim:
                raise ValueError(
                    f"modules share {parameter!r}: one splits it along dim"
                    f" {self._dims[parameter]}, another along dim {dim}; expected the same dim"
                )
            return
        self._dims[parameter] = dim
        shape = parameter.shape
        if dim is not None:
            parameter.set_grad_home(None)
            parameter.grad = None
            parameter.data = own_part(parameter.data, self.group, dim).copy()
        if self.mesh is not None:  # a Sharding needs the dims of a mesh
            dims = [] if dim is None else [*[()] * dim, tuple(range(self.mesh.ndim))]
            sharding = Sharding.of_positions(self.mesh, dims)
            parameter.global_part = GlobalPart(sharding, shape)

    def sum(self, contribution: Array) -> Array:
        """Return the sum of the ranks' contributions to a gradient. A collective."""
        contribution = namespace(contribution).ascontiguousarray(contribution)
        self.group.all_reduce(contribution)
        return contribution
