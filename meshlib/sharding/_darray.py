"""``DArray``: a global array that is distributed over a mesh and works like a NumPy array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

import numpy as np

from meshlib._mesh.device_mesh import DeviceMesh
from meshlib.sharding._global_array import GlobalArray
from meshlib.sharding._jax_arrays import from_jax, to_jax
from meshlib.sharding._rules.shapes import assign, select
from meshlib.sharding._rules.table import apply_function, apply_ufunc

if TYPE_CHECKING:
    import jax


@final
class DArray(GlobalArray):
    """A global array on a mesh: a ``Sharding`` and, on each rank, a local NumPy or CuPy array.

    It is made by ``distribute_array``, ``DArray.from_local`` and the functions of
    ``meshlib.sharding`` (``zeros``, ``ones``, ``full``, ``random``). Operators and NumPy's
    functions work on it as on the global array; each rank computes its own part. They are SPMD:
    every rank of the mesh makes the same calls. None of them communicates, except that partial
    values are reduced when first needed. If operands would have to be redistributed, or an
    operation has no rule (``meshlib.sharding._rules``), it raises ``ShardingError``, which names
    the remedy. On a rank outside the mesh a DArray has no local array; only its attributes,
    ``redistribute`` and ``full_array`` work there.
    """

    __slots__ = ()

    # ------------------------------------------------------------------ other libraries

    def to_jax(self) -> jax.Array:
        """Return the ``jax.Array`` of the same global values, on ``mesh.to_jax()``.

        Each process has one device there. Partial values are reduced first. Raises ValueError for
        uneven parts, which JAX's arrays cannot have, and the errors of ``DeviceMesh.to_jax``.
        """
        return to_jax(self)

    @classmethod
    def from_jax(cls, array: jax.Array, mesh: DeviceMesh) -> Self:
        """Return a ``jax.Array`` on ``mesh.to_jax()`` as a DArray on ``mesh``.

        On the CPU the local array shares JAX's memory, which is read-only. Raises ValueError for
        an array on another mesh or without a ``NamedSharding``.
        """
        return cls(*from_jax(array, mesh))

    # ------------------------------------------------------------------ NumPy's protocols

    def __getitem__(self, index: Any) -> Self:
        return select(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        assign(self, index, value)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return apply_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return apply_function(func, args, kwargs)
