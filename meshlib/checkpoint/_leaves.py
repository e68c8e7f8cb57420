"""The arrays of a state, of any library: their sharding, this rank's part, and their rebuilding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshlib.checkpoint._files.zarr import ChunkGrid, dtype_name
from meshlib.sharding._darray import DArray
from meshlib.sharding._local import Box, array_module, module_for
from meshlib.sharding._sharding import Sharding

Host = npt.NDArray[Any]


def is_array(leaf: Any) -> bool:
    """Return whether ``leaf`` is saved as an array: a DArray, or one of NumPy, CuPy or JAX."""
    return isinstance(leaf, DArray | np.ndarray) or array_module(leaf) is not None or _is_jax(leaf)


def is_wanted_array(leaf: Any) -> bool:
    """Return whether ``leaf`` describes an array to load: a Sharding, or a shape and dtype."""
    described = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return (described and not isinstance(leaf, np.generic)) or isinstance(leaf, Sharding)


def _is_jax(leaf: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def check_saved(name: str, leaf: Any) -> None:
    """Raise TypeError, which names the array, if ``leaf`` cannot be saved."""
    if _is_jax(leaf):
        if not leaf.is_fully_addressable:
            raise TypeError(
                f"array {name!r} is a jax.Array over several processes; expected"
                " DArray.from_jax(array, mesh)"
            )
        if not isinstance(leaf.dtype, np.dtype):
            raise TypeError(
                f"array {name!r} holds JAX's random keys; expected jax.random.key_data(key)"
            )
    kind: type[Any] = type(leaf)
    if isinstance(leaf, np.ndarray) and kind not in (np.ndarray, np.memmap):
        raise TypeError(
            f"array {name!r} is a {kind.__module__}.{kind.__qualname__}, but only its elements"
            " would be saved; expected np.asarray(array)"
        )
    dtype_name(leaf.dtype, f": array {name!r}")


def sharding_of(leaf: Any) -> Sharding | None:
    """Return the sharding of an array; None for an array that every rank has whole."""
    if isinstance(leaf, Sharding):
        return leaf
    return leaf.sharding if isinstance(leaf, DArray) else None


def to_host(leaf: Any) -> Host | None:
    """Return this rank's part of an array in host memory: a view if it is there already."""
    local = leaf.to_local() if isinstance(leaf, DArray) else leaf
    if local is None or isinstance(local, np.ndarray):
        return cast("Host | None", local)
    return np.asarray(local) if _is_jax(local) else local.get()


Target = tuple[Box | None, Callable[[Host | None], Any]]
"""The part of an array that this rank loads (None outside of the mesh), and a function that makes
the array from this part.
"""


def why_not_like(grid: ChunkGrid, leaf: Any) -> str | None:
    """Return why an array in a checkpoint cannot become one like ``leaf``; None if it can."""
    if not isinstance(leaf, Sharding):
        if tuple(leaf.shape) != grid.shape:
            return f"has shape {grid.shape}, not {tuple(leaf.shape)}"
        if np.dtype(leaf.dtype).newbyteorder("=") != grid.dtype:
            return f"has dtype {grid.dtype}, not {np.dtype(leaf.dtype)}"
    sharding = sharding_of(leaf)
    if sharding is not None and len(grid.shape) < len(sharding.dims):
        return f"has shape {grid.shape}, of which {sharding} splits dim {len(sharding.dims) - 1}"
    if sharding is not None and sharding.partial_dims and isinstance(leaf, Sharding):
        return f"cannot be loaded as {sharding}, which has partial values"
    return None


def target_like(grid: ChunkGrid, leaf: Any) -> Target:
    """Return the part to read for an array like ``leaf``, and the function that makes it one."""
    sharding = sharding_of(leaf)
    if sharding is None:
        return grid.whole, _finisher(leaf)
    landed = sharding.reduced()
    mesh = landed.mesh
    rank = mesh.get_rank()
    inside = mesh.coordinate_of(rank) is not None

    # ``leaf`` may have another byte order.
    dtype = grid.dtype if isinstance(leaf, Sharding) else np.dtype(leaf.dtype)

    def finish(host: Host | None) -> DArray:
        local = None if host is None else module_for(mesh.device_type).asarray(host, dtype=dtype)
        return DArray(local, landed, grid.shape, dtype)

    return landed.slices(grid.shape, rank) if inside else None, finish


def _finisher(leaf: Any) -> Callable[[Host | None], Any]:
    if _is_jax(leaf):
        import jax

        return lambda host: jax.device_put(host, leaf.sharding if leaf.committed else None)
    module = None if leaf is ... else array_module(leaf)
    # Pass the dtype, which may have another byte order.
    return (lambda host: host) if module is None else partial(module.asarray, dtype=leaf.dtype)
