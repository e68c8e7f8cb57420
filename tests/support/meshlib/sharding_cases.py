"""Meshes and shardings for the tests of this folder, by hypothesis."""

import numpy as np
from hypothesis import strategies as st

import meshlib as dist
from meshlib.sharding import Sharding

NAMES = ("a", "b", "c")


def named_mesh(*shape):
    return dist.DeviceMesh.from_shape("cpu", shape, mesh_dim_names=NAMES[: len(shape)])


@st.composite
def meshes(draw, max_dims=3, max_ranks=24):
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=max_dims)
    return named_mesh(*draw(sizes.filter(lambda s: _product(s) <= max_ranks)))


@st.composite
def shardings(draw, mesh, ndim, partial_ops=("sum", "max")):
    """Any sharding of ``ndim`` dims: each mesh dim splits one, is partial or none."""
    dims = [[] for _ in range(ndim)]
    partial = []
    op = draw(st.sampled_from(partial_ops)) if partial_ops else None
    for i in draw(st.permutations(range(mesh.ndim))):
        place = draw(st.integers(-2 if op else -1, ndim - 1))
        if place >= 0:
            dims[place].append(i)
        elif place == -2:
            partial.append((i, op))
    return Sharding.of_positions(mesh, dims, partial)


def _product(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result


def draw_sharding(chance, mesh, ndim):
    """Return a sharding by ``chance``, a ``random.Random``; as ``shardings`` draws them."""
    dims, partial = [[] for _ in range(ndim)], []
    op = chance.choice(["sum", "max"])
    for i in chance.sample(range(mesh.ndim), mesh.ndim):
        place = chance.randrange(-2, ndim)
        if place >= 0:
            dims[place].append(i)
        elif place == -2:
            partial.append((i, op))
    return Sharding.of_positions(mesh, dims, partial)


def value_by_hand(shape):
    """Return the global array of ``shape`` that stands for all."""
    return np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)


def made_by_hand(shape, sharding, rank):
    """Return what ``rank`` has of it: where values are partial, parts that make it up. Or None."""
    at = sharding.mesh.coordinate_of(rank)
    if at is None:
        return None
    part = value_by_hand(shape)[sharding.slices(shape, rank)].copy()
    for i, op in sharding.partial_dims:
        if op == "sum":
            # 1 more on the first, as much less on the others together.
            n = sharding.mesh.shape[i]
            part = part - (n - 1) * 2.0 if at[i] == 0 else np.full_like(part, 2.0)
        elif at[i]:
            part = part - at[i]
    return np.asarray(part)
