"""Conversion between DArrays and ``jax.Array``, on the mesh of ``DeviceMesh.to_jax``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlib._mesh.device_mesh import DeviceMesh
from meshlib.sharding._sharding import Sharding

if TYPE_CHECKING:
    import jax

    from meshlib.sharding._global_array import GlobalArray


def to_jax(x: GlobalArray) -> jax.Array:
    """Implement ``DArray.to_jax``."""
    import jax
    import jax.sharding

    x = x.reduced()
    mesh = x.mesh
    for d, length in enumerate(x.shape):
        if length % prod(mesh.shape[i] for i in x.sharding.split_of(d)):
            raise ValueError(
                f"to_jax: dim {d} of {x!r} is not split evenly, as JAX's arrays must be;"
                " redistribute it first"
            )
    jax_mesh = mesh.to_jax()
    names = jax_mesh.axis_names
    spec = [tuple(names[i] for i in dim) or None for dim in x.sharding.dims]
    sharding = jax.sharding.NamedSharding(jax_mesh, jax.sharding.PartitionSpec(*spec))
    (device,) = (d for d in jax_mesh.local_devices)
    part = jax.device_put(x.local, device)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [part])


def from_jax(array: jax.Array, mesh: DeviceMesh) -> tuple[Any, Sharding, tuple[int, ...], Any]:
    """Return the arguments of the DArray of ``array``; see ``DArray.from_jax``."""
    import jax.sharding

    sharding = array.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise ValueError(f"from_jax: the array has {sharding}; expected a NamedSharding")
    names = sharding.mesh.axis_names
    if sharding.mesh != mesh.to_jax():
        raise ValueError(f"from_jax: the array is on {sharding.mesh}; expected {mesh.to_jax()}")
    own = Sharding(mesh, _by_number(sharding.spec, names))
    (shard,) = array.addressable_shards
    return np.asarray(shard.data), own, tuple(array.shape), array.dtype


def _by_number(spec: Any, names: tuple[Any, ...]) -> list[Any]:
    """Return JAX's spec with mesh dims by number, because a DeviceMesh may have no names."""
    entries: list[Any] = []
    for entry in spec:
        keys = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        entries.append(tuple(names.index(key) for key in keys) or None)
    return entries
