"""A distributed global array: the part of ``DArray`` that needs no rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, overload

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from meshlib._arrays.checks import check_op
from meshlib._mesh.device_mesh import DeviceMesh
from meshlib.sharding._local import Array
from meshlib.sharding._parts import agreed_shape, own_shape
from meshlib.sharding._redistribution.execute import begin, carry_out
from meshlib.sharding._redistribution.plan import plan
from meshlib.sharding._sharding import Sharding
from meshlib.sharding._sharding_value import PartialDims
from meshlib.sharding._spec import REDUCTIONS

if TYPE_CHECKING:
    from meshlib._calls.work import Work


A = TypeVar("A", bound="GlobalArray")


class ShardingError(ValueError):
    """An operation has no rule for the shardings of its arrays; the message names the remedy."""


class GlobalArray(NDArrayOperatorsMixin):
    """The base of ``DArray``, which adds NumPy's dispatch to the rules."""

    __slots__ = ("_local", "dtype", "shape", "sharding")

    # Without this, a `for` loop would call __getitem__ with 0, 1, 2 ….
    __iter__ = None
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as NumPy's arrays, == is elementwise
    __array_priority__ = 1000

    shape: tuple[int, ...]
    """The global shape."""
    dtype: np.dtype[Any]
    """The dtype."""
    sharding: Sharding
    """The array's sharding."""

    def __init__(
        self, local: Array | None, sharding: Sharding, shape: Sequence[int], dtype: Any
    ) -> None:
        """Use ``DArray.from_local``, which checks its arguments."""
        self._local = local
        self.sharding = sharding
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)

    @classmethod
    def from_local(
        cls,
        local: Array,
        sharding: Sharding,
        shape: Sequence[int] | None = None,
        *,
        run_check: bool = True,
    ) -> Self:
        """Return the global array whose part on this rank is ``local``, which is not copied.

        With ``run_check``, the ranks of the mesh compare their parts' shapes and dtypes. Each rank
        sends a few bytes to every other. The global ``shape`` may then be left out, even if parts
        are uneven. If a part is wrong, all ranks raise ValueError, which names the first rank with
        a wrong part. Without ``run_check`` no rank sends anything. Parts are then assumed to be
        even, unless ``shape`` is given.

        Raises ValueError if ``local`` has another shape than its part of ``shape``, and on a rank
        outside the mesh. Raises TypeError unless ``local`` is a NumPy or CuPy array with a dtype to
        which the op of its partial values applies.
        """
        lengths = (agreed_shape if run_check else own_shape)(local, sharding, shape)
        for _, op in sharding.partial_dims:
            check_op(REDUCTIONS[op], local.dtype)
        return cls(local, sharding, lengths, local.dtype)

    # ------------------------------------------------------------------ attributes

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh."""
        return self.sharding.mesh

    @property
    def ndim(self) -> int:
        """The number of dims of the global array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the global array."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the global array."""
        return self.size * self.dtype.itemsize

    def to_local(self) -> Array:
        """Return this rank's part: a view, so that writing to it changes this array.

        Partial values are not reduced. It is None on a rank outside the mesh.
        """
        return None if self._local is None else self._local.view()

    @property
    def local(self) -> Array:
        """The result of ``to_local``. Raises ValueError on a rank outside the mesh."""
        if self._local is None:
            raise ValueError(
                f"rank {self.mesh.get_rank()} is not in {self.mesh}, so it has no part of the array"
            )
        return self._local.view()

    def __repr__(self) -> str:
        return f"DArray(shape={self.shape}, dtype={self.dtype}, {self.sharding})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    # ------------------------------------------------------------------ redistribution

    @overload
    def redistribute(
        self, spec: Any = None, partial: PartialDims = None, *, async_op: Literal[False] = False
    ) -> Self: ...

    @overload
    def redistribute(
        self, spec: Any = None, partial: PartialDims = None, *, async_op: Literal[True]
    ) -> Work[Any]: ...

    def redistribute(
        self, spec: Any = None, partial: PartialDims = None, *, async_op: bool = False
    ) -> Self | Work[Any]:
        """Return the same global array in another sharding; every rank of the mesh calls it.

        ``spec`` is a spec for this mesh, or a ``Sharding`` on this or another mesh. The ranks of
        both meshes then make the call. The steps are those of ``self.sharding.plan(...)``. An array
        that has the sharding already is returned itself. With ``async_op`` the result is a
        ``Work``, whose ``result()`` is the array; do not change this array until it is done.
        """
        target = self.sharding.with_spec(spec, partial)
        steps = plan(self.sharding, target, self.shape, self.dtype)

        def made(local: Array | None) -> Self:
            if not steps.steps and target == self.sharding:
                return self
            return type(self)(local, target, self.shape, self.dtype)

        return (begin if async_op else carry_out)(steps, self._local, made)

    def full_array(self) -> Array:
        """Return the whole global array, a new one, on every rank of the mesh (None outside)."""
        everywhere = self.redistribute(Sharding(self.mesh))
        local = everywhere.to_local()
        return local.copy() if everywhere is self and local is not None else local

    def reduced(self) -> Self:
        """Return the array with partial values reduced; itself if there are none."""
        if not self.sharding.partial_dims:
            return self
        return self.redistribute(self.sharding.reduced())

    # ------------------------------------------------------------------ as NumPy's arrays

    @property
    def T(self) -> Self:
        """The array with its dims in reverse order."""
        return self.transpose()

    def item(self) -> Any:
        """Return the value of an array with one element, on every rank.

        Raises ValueError for another number of elements.
        """
        if self.size != 1:
            raise ValueError(f"{self!r} has {self.size} elements; expected one")
        return self.full_array().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def astype(self, dtype: Any, copy: bool = True) -> Self:
        """Return the array in another dtype, a copy; partial values are reduced first.

        Without ``copy`` an array that has the dtype is returned itself, even if it is partial.
        """
        if not copy and self.dtype == np.dtype(dtype):
            return self
        x = self.reduced()
        local = None if x._local is None else x._local.astype(dtype)
        return type(self)(local, x.sharding, x.shape, dtype)

    def copy(self) -> Self:
        """Return a copy in the same sharding."""
        local = None if self._local is None else self._local.copy()
        return type(self)(local, self.sharding, self.shape, self.dtype)

    def reshape(self, *shape: Any) -> Self:
        """Return the array in another shape, in which each rank's part must stay one part."""
        return cast(Self, np.reshape(self, shape[0] if len(shape) == 1 else shape))

    def transpose(self, *axes: Any) -> Self:
        """Return the array with its dims in another order (default: reversed)."""
        return cast(Self, np.transpose(self, axes[0] if len(axes) == 1 else axes or None))

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Self:
        """Return the sum, partial along the mesh dims that split ``axis``."""
        return np.sum(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Self:
        """Return the mean, partial along the mesh dims that split ``axis``."""
        return np.mean(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Self:
        """Return the greatest value, partial along the mesh dims that split ``axis``."""
        return np.max(self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Self:
        """Return the least value, partial along the mesh dims that split ``axis``."""
        return np.min(self, axis=axis, keepdims=keepdims)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ShardingError(
            f"{self!r} is not gathered implicitly; use full_array() for the whole array,"
            " to_local() for this rank's part"
        )
