"""Creation of DArrays: from a whole array, of equal values, of random values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshlib.sharding._darray import DArray
from meshlib.sharding._draws import draw_part
from meshlib.sharding._local import Array, Box, array_module, module_for, shape_of
from meshlib.sharding._parts import agreed_source, check_sharding
from meshlib.sharding._redistribution.across import spread
from meshlib.sharding._sharding import Sharding
from transport._checks import to_whole_number


def distribute_array(array: Array, sharding: Sharding, *, src_data_rank: int | None = 0) -> DArray:
    """Return the ``array`` of one rank as a DArray in ``sharding``.

    ``src_data_rank`` is that rank's place in the mesh (0: the first). On other ranks ``array`` is
    ignored and may be None. All ranks compare their arguments, then each receives its part, once.
    With ``src_data_rank=None`` each rank of the mesh passes the same whole array, and nothing is
    sent or compared. The parts are copies.

    Raises TypeError, on all ranks, unless ``array`` is a NumPy or CuPy array. Raises ValueError, on
    all ranks, for a ``src_data_rank`` outside of the mesh, an array with fewer dims than the spec,
    and arguments that differ between ranks. Raises ValueError on a rank outside the mesh.
    """
    check_sharding(sharding)
    mesh = sharding.mesh
    rank = mesh.get_rank()
    if src_data_rank is None:
        if array_module(array) is None:
            raise TypeError(f"array is a {type(array).__name__}; expected a NumPy or CuPy array")
        lengths = sharding.check_shape(array.shape)
        landed = sharding.reduced()
        part = array[(*landed.slices(lengths, rank), ...)].copy()
        return DArray(part, landed, lengths, array.dtype).redistribute(sharding)
    src, shape, dtype = agreed_source(array, sharding, src_data_rank)
    group = mesh.process_group
    is_source = group.rank() == src
    whole = sharding.reduced()
    # Replicas receive a piece of their part each, and gather the other pieces among themselves.
    landed = spread(whole, shape, whole.replicated_dims, keep=whole.dims)
    module = array_module(array) if is_source else module_for(mesh.device_type)
    part = module.empty(landed.local_shape(shape, rank), dtype)
    parts = None
    if is_source:
        parts = [array[(*landed.slices(shape, member), ...)] for member in group.ranks]
    mesh.scatter(part, parts, group_src=src)
    return DArray(part, landed, shape, dtype).redistribute(sharding)


def zeros(shape: Sequence[int], sharding: Sharding, dtype: npt.DTypeLike = float) -> DArray:
    """Return a global array of zeros; every rank makes its own part. Raises the errors of
    ``full``."""
    return full(shape, sharding, 0, dtype)


def ones(shape: Sequence[int], sharding: Sharding, dtype: npt.DTypeLike = float) -> DArray:
    """Return a global array of ones; every rank makes its own part. Raises the errors of
    ``full``."""
    return full(shape, sharding, 1, dtype)


def full(
    shape: Sequence[int], sharding: Sharding, fill_value: Any, dtype: npt.DTypeLike | None = None
) -> DArray:
    """Return a global array of ``fill_value``; every rank makes its own part, and nothing is sent.

    ``fill_value`` is a single value, or an array that broadcasts to ``shape``, the same on all
    ranks. ``dtype`` is that of the value by default. On a rank outside the mesh the result has no
    local array. Raises ValueError for a shape with fewer dims than the spec, and for a value that
    does not broadcast to it.
    """
    check_sharding(sharding)
    lengths = sharding.check_shape(shape)
    wanted = np.asarray(fill_value).dtype if dtype is None else np.dtype(dtype)
    values = np.broadcast_to(fill_value, lengths) if np.ndim(fill_value) else None

    def make(box: Box) -> Array:
        module = module_for(sharding.mesh.device_type)
        return module.full(shape_of(box), fill_value if values is None else values[box], wanted)

    return _made(lengths, sharding, wanted, make)


def random(
    shape: Sequence[int],
    sharding: Sharding,
    *,
    seed: int,
    dtype: npt.DTypeLike = float,
    distribution: Literal["uniform", "normal"] = "uniform",
) -> DArray:
    """Return a global array of random values that are the same on any mesh, in any sharding.

    ``"uniform"``: from [0, 1); ``"normal"``: with mean 0 and variance 1. ``seed`` is an integer of
    at least 0, ``dtype`` float64, float32 or float16. Every rank draws its own part, and nothing is
    sent; see ``meshlib.sharding._draws``. Raises ValueError for other arguments.
    """
    check_sharding(sharding)
    wanted: np.dtype[Any] = np.dtype(dtype)
    if wanted.char not in "efd":
        raise ValueError(f"dtype is {wanted}; expected float64, float32 or float16")
    if distribution not in ("uniform", "normal"):
        raise ValueError(f"distribution is {distribution!r}; expected 'uniform' or 'normal'")
    if to_whole_number(seed, "seed") < 0:
        raise ValueError(f"seed is {seed}; expected at least 0")
    lengths = sharding.check_shape(shape)

    def make(box: Box) -> Array:
        drawn = draw_part(lengths, box, seed, wanted, distribution)
        return module_for(sharding.mesh.device_type).asarray(drawn)

    return _made(lengths, sharding, wanted, make)


def _made(
    shape: Sequence[int], sharding: Sharding, dtype: np.dtype[Any], make: Callable[[Box], Array]
) -> DArray:
    lengths = sharding.check_shape(shape)
    rank, landed = sharding.mesh.get_rank(), sharding.reduced()
    inside = sharding.mesh.coordinate_of(rank) is not None
    local = make(landed.slices(lengths, rank)) if inside else None
    return DArray(local, landed, lengths, dtype).redistribute(sharding)
