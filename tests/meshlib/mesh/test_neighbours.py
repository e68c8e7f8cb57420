"""Shifts along a mesh, and ghost cells, compared with one array that has all blocks."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from meshlib._mesh.spec import MeshDimError
from meshlib.testing import run_ranks

GRID = {"y": 0, "x": 1}


@pytest.mark.parametrize("distance", [1, 2, -1])
@pytest.mark.parametrize("periodic", [False, True])
def test_a_shift_finds_source_and_destination(distance, periodic):
    def rank():
        mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("y", "x"))
        return mesh.shift("x", distance, periodic=periodic), mesh.shift("y", 1)

    grid = np.arange(6).reshape(2, 3)
    for number, (along_x, along_y) in enumerate(run_ranks(rank, 6)):
        y, x = divmod(number, 3)
        expected = [
            int(grid[y, at % 3]) if periodic or 0 <= at < 3 else None
            for at in (x - distance, x + distance)
        ]
        assert list(along_x) == expected
        assert along_y == ((None, number + 3) if y == 0 else (number - 3, None))


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (3, 2), (1, 1), (2, 1)])
@pytest.mark.parametrize("periodic", [False, True, {"x": True}])
@pytest.mark.parametrize("width", [1, 2])
def test_ghost_cells_are_the_neighbours_cells(shape, periodic, width):
    """With corners: each block with its ghost cells is a window of the whole grid."""
    height, breadth, channels = 5, 4, 3
    whole = np.arange(shape[0] * height * shape[1] * breadth * channels, dtype=float)
    whole = whole.reshape(shape[0] * height, shape[1] * breadth, channels)

    def rank():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("y", "x"))
        y, x = mesh.get_coordinate()
        block = np.full((height + 2 * width, breadth + 2 * width, channels), -1.0)
        mine = whole[y * height : (y + 1) * height, x * breadth : (x + 1) * breadth]
        block[width:-width, width:-width] = mine
        assert mesh.exchange_halo(block, GRID, width, periodic=periodic) is block
        return block

    around = periodic if isinstance(periodic, dict) else {"y": periodic, "x": periodic}
    padded = np.pad(whole, ((width, width), (width, width), (0, 0)), constant_values=-1.0)
    for axis, dim in enumerate(("y", "x")):
        if around.get(dim):
            lines = np.moveaxis(padded, axis, 0)
            lines[:width], lines[-width:] = lines[-2 * width : -width], lines[width : 2 * width]
    for number, block in enumerate(run_ranks(rank, shape[0] * shape[1])):
        y, x = divmod(number, shape[1])
        window = padded[
            y * height : (y + 1) * height + 2 * width, x * breadth : (x + 1) * breadth + 2 * width
        ]
        np.testing.assert_array_equal(block, window)


def refused():
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("y", "x"))
    fine = np.zeros((5, 5))
    frozen = np.zeros((5, 5))
    frozen.flags.writeable = False
    for arguments, kind, words in (
        (
            ([[0.0]], GRID),
            TypeError,
            "array must be a NumPy array that can be written to, got list",
        ),
        ((frozen, GRID), TypeError, "can be written to"),
        ((fine, GRID, 0), ValueError, "width must be at least 1, got 0"),
        ((fine, GRID, 2), ValueError, "array has 5 cells along axis 0; expected at least 6"),
        ((fine, {"z": 0}), MeshDimError, "z"),
        ((fine, {"y": 0, "x": 0}), ValueError, "dims['x'] is axis 0"),
        ((fine, {"y": 2}), ValueError, "dims['y'] is axis 2"),
        ((fine, "yx"), TypeError, "dims must map dims to axes"),
    ):
        with pytest.raises(kind) as caught:
            mesh.exchange_halo(*arguments)
        assert words in str(caught.value)
    with pytest.raises(TypeError, match="distance"):
        mesh.shift("x", 0.5)


def test_wrong_arguments_are_named():
    run_ranks(refused, 1)


@pytest.mark.parametrize("periodic", [False, True, {"x": True}])
@pytest.mark.parametrize("shape", [(2, 3), (1, 2)])
@pytest.mark.parametrize("named", [True, False])
def test_neighbours_get_what_was_sent_to_them(shape, periodic, named):
    if isinstance(periodic, dict) and not named:
        periodic = {1: True}
    size = shape[0] * shape[1]

    def rank():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("y", "x") if named else None)
        me = dist.get_rank()
        inputs = [np.array([me, place]) for place in range(4)]
        outputs = [np.full(2, -1) for _ in range(4)]
        assert mesh.neighbor_all_to_all(outputs, inputs, periodic=periodic) is outputs
        same = mesh.neighbor_all_gather([np.full(1, -1)] * 4, np.array([me]), periodic=True)
        return [out.tolist() for out in outputs], len(same)

    grid = np.arange(size).reshape(shape)
    for number, (outputs, count) in enumerate(run_ranks(rank, size)):
        expected = []
        for axis in (0, 1):
            ring = periodic if isinstance(periodic, bool) else axis == 1
            for side, step in enumerate((-1, 1)):
                at = np.array(divmod(number, shape[1]))
                at[axis] += step
                inside = ring or 0 <= at[axis] < shape[axis]
                peer = int(grid[tuple(at % shape)])
                expected.append([peer, 2 * axis + 1 - side] if inside else [-1, -1])
        assert outputs == expected
        assert count == 4


def test_a_gather_from_neighbours_of_jax_arrays():
    jnp = pytest.importorskip("jax.numpy")

    def rank():
        mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("x",))
        boxes = [jnp.zeros(1), jnp.zeros(1)]
        return [
            float(box[0]) for box in mesh.neighbor_all_gather(boxes, jnp.ones(1) + dist.get_rank())
        ]

    assert run_ranks(rank, 3) == [[0, 2], [1, 3], [2, 0]]


@pytest.mark.parametrize(
    ("outputs", "inputs", "error", "words"),
    [
        ([np.ones(1)], [np.ones(1)] * 2, ValueError, "outputs has 1 entries; expected 2"),
        ([np.ones(1)] * 2, [np.ones(1)] * 3, ValueError, "inputs has 3 entries; expected 2"),
        ((np.ones(1),) * 2, [np.ones(1)] * 2, TypeError, "outputs must be a list"),
        ([np.ones(1)] * 2, "ab", TypeError, "inputs must be a list"),
        ([np.ones(1)] * 2, [None] * 2, TypeError, "tensor"),
    ],
)
def test_wrong_lists_for_neighbours(outputs, inputs, error, words):
    def rank():
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
        with pytest.raises(error, match=words):
            mesh.neighbor_all_to_all(outputs, inputs, periodic=True)

    run_ranks(rank, 1)
