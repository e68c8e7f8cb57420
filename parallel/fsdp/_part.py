"""One parameter of which each rank keeps a part, and lends the whole to the modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshlib import DeviceMesh
from meshlib.sharding import Sharding
from parallel._arrays import Array, namespace
from parallel._core.shards import rows_of
from parallel.nn._global_part import GlobalPart
from parallel.nn._parameter import Parameter

if TYPE_CHECKING:
    from parallel.fsdp._group import ParameterGroup


class Part(GlobalPart):
    """This rank's part of ``parameter``, along dim 0 over the last dim of ``mesh``.

    ``parameter.data`` and ``grad`` are the part, or, while it is lent, the whole, of
    ``whole_shape``. The gradient of the other is kept here: ``part_grad`` while the whole is lent,
    ``pending`` (what was not reduced yet) while it is not.
    """

    kept = True

    def __init__(self, parameter: Parameter, mesh: DeviceMesh, group: ParameterGroup) -> None:
        self.parameter = parameter
        self.group = group
        whole = parameter.master
        self.whole_shape: tuple[int, ...] = tuple(whole.shape)
        self._split = parameter.global_part
        self._lend_from: Array | None = None
        self._place(mesh, namespace(whole).array(whole[self._rows(mesh)], order="C"))

    def _place(self, mesh: DeviceMesh, array: Array) -> None:
        """Keep ``array`` as the part on ``mesh``, without a gradient."""
        super().__init__(*self._lies(mesh))
        self.part_grad: Array | None = None
        self.pending: Array | None = None
        parameter = self.parameter
        parameter.grad_home = parameter.grad = None
        parameter.substitute(None)
        parameter.data = array
        parameter.global_part = self

    def _lies(self, mesh: DeviceMesh) -> tuple[Sharding, tuple[int, ...]]:
        """Return how the parameter lies once dim 0 is split over ``mesh``, and its global shape.

        One that a layer has split already (tensor parallel) lies on the dims of both: dim 0 is
        split by the layer's first, and each of those parts by the last dim of ``mesh``.
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
        """Be this rank's part on another mesh.

        Where it has another size there, it has no values: they are the caller's affair.
        """
        old, rows = self.array, self._rows(mesh)
        height = rows.stop - rows.start
        # A rank that has come has had the whole, as the only shard.
        part = namespace(old).array(old[rows], order="C") if old.shape == self.whole_shape else old
        if part.shape[0] != height:
            part = namespace(old).zeros((height, *self.whole_shape[1:]), dtype=old.dtype)
        self._place(mesh, part)

    @property
    def array(self) -> Array:
        """The part."""
        return self.parameter.master if self._lend_from is None else self._lend_from

    @property
    def lent(self) -> bool:
        """Whether modules compute with the whole."""
        return self._lend_from is not None

    def lend(self, whole: Array) -> None:
        """Let modules compute with ``whole``, and add to its gradient."""
        parameter = self.parameter
        part = self._lend_from = parameter.master
        parameter.substitute(None)
        parameter.data, parameter.trained_dtype = whole, part.dtype
        self.part_grad, parameter.grad = parameter.grad, self.pending
        self.pending = None

    def take_back(self) -> None:
        """Let ``parameter`` be the part again."""
        parameter = self.parameter
        parameter.substitute(None)
        parameter.data, parameter.trained_dtype = self._lend_from, None
        self._lend_from = parameter.grad_home = None
        self.pending, parameter.grad = parameter.grad, self.part_grad
        self.part_grad = None

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
