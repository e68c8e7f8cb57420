"""One parameter of which each rank keeps a part, and lends the whole to the modules."""

from __future__ import annotations

from meshlib import DeviceMesh
from meshlib.sharding import Sharding
from parallel.arrays import Array, namespace
from parallel.core.shards import rows_of
from parallel.nn.parameter import Parameter


class Part:
    """This rank's part of ``parameter``, along dim 0 over the last dim of ``mesh``.

    ``parameter.grad`` is the gradient of what the parameter is at the time. That of the other is
    kept here: ``part_grad`` while the whole is lent, ``pending`` (what was not reduced yet) while
    it is not.
    """

    def __init__(self, parameter: Parameter, mesh: DeviceMesh) -> None:
        self.parameter = parameter
        whole = parameter.data
        self.shape: tuple[int, ...] = tuple(whole.shape)
        self.part_grad: Array | None = None
        self.pending: Array | None = None
        self.lent = False
        part = namespace(whole).array(whole[self._rows(mesh)], order="C")
        parameter.keep_part(part, *sharding_of(parameter, mesh, self.shape))

    def _rows(self, mesh: DeviceMesh) -> slice:
        last = mesh.ndim - 1
        return rows_of(self.shape, mesh.shape[last], mesh.get_local_rank(last))

    def move_to(self, mesh: DeviceMesh) -> None:
        """Be this rank's part on another mesh.

        Where it has another size there, it has no values: they are the caller's affair.
        """
        old, rows = self.array, self._rows(mesh)
        height = rows.stop - rows.start
        # Who has come has had the whole, as the only shard.
        part = namespace(old).array(old[rows], order="C") if old.shape == self.shape else old
        if part.shape[0] != height:
            part = namespace(old).zeros((height, *self.shape[1:]), dtype=old.dtype)
        self.part_grad = self.pending = None
        self.parameter.keep_part(part, *sharding_of(self.parameter, mesh, self.shape))

    @property
    def array(self) -> Array:
        """The part."""
        return self.parameter.master

    def lend(self, whole: Array) -> None:
        """Let modules compute with ``whole``."""
        self.part_grad = self.parameter.grad
        self.parameter.lend(whole, self.pending)
        self.pending = None
        self.lent = True

    def take_back(self) -> None:
        """Let ``parameter`` be the part again."""
        self.pending = self.parameter.take_back(self.part_grad)
        self.part_grad = None
        self.lent: bool = False

    @property
    def whole_grad(self) -> Array | None:
        """The gradient of the whole that this rank has computed and that was not reduced yet."""
        return self.parameter.grad if self.lent else self.pending

    @whole_grad.setter
    def whole_grad(self, grad: Array | None) -> None:
        if self.lent:
            self.parameter.grad = grad
        else:
            self.pending = grad

    def add_grad(self, grad: Array) -> None:
        """Add ``grad``, which was reduced, to the part's gradient; it is taken over."""
        grad = grad.reshape(self.array.shape).astype(self.array.dtype, copy=False)
        own = self.part_grad if self.lent else self.parameter.grad
        if own is not None:
            own += grad
        elif self.lent:
            self.part_grad = grad
        else:
            self.parameter.grad = grad


def sharding_of(
    parameter: Parameter, mesh: DeviceMesh, shape: tuple[int, ...]
) -> tuple[Sharding, tuple[int, ...]]:
    """Return how a parameter lies once dim 0 is split over the last dim of ``mesh``, and its shape.

    ``shape`` is that of the array that modules compute with.

    One that a layer has split already (tensor parallel) lies on the dims of both: dim 0 is split by
    the layer's first, and each of those parts by that of ``mesh``.
    """
    last = mesh.ndim - 1
    if parameter.split is None:
        return Sharding.of_positions(mesh, [(last,)]), shape
    outer, shape = parameter.split
    both = DeviceMesh.concatenate([mesh, outer.mesh])
    dims = [tuple(i + mesh.ndim for i in dim) for dim in outer.dims] or [()]
    dims[0] = (*dims[0], last)
    return Sharding.of_positions(both, dims), shape
