"""Meshes and shardings for the tests of this folder, by hypothesis."""

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
