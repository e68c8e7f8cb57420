"""Ghost cells in ``jax.jit``: those that ``mesh.exchange_halo`` fills, and their derivative."""

import itertools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import meshlib as dist  # noqa: E402
from meshlib import jit as mj  # noqa: E402
from meshlib._mesh.spec import MeshDimError  # noqa: E402
from meshlib.testing import run_ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

AXES = {"y": 1, "x": -1}
CELLS = (3, 8, 7)


def block_of(rank, shape=CELLS):
    return np.random.default_rng(rank).integers(0, 100, shape).astype(float)


ALL = list(itertools.product((1, 2), (False, True, {"x": True})))
TWO = [(1, {"y": True}), (2, False)]


@pytest.mark.parametrize(("shape", "cases"), [((2, 2), ALL), ((4, 1), TWO), ((1, 1), TWO)])
def test_ghost_cells_are_those_of_numpy(shape, cases):
    def rank():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("y", "x"))
        given, found = block_of(dist.get_rank()), []
        for width, periodic in cases:

            @jax.jit
            def filled(x, width=width, periodic=periodic):
                return mj.exchange_halo(x, mesh, AXES, width, periodic=periodic)

            expected = mesh.exchange_halo(given.copy(), AXES, width, periodic=periodic)
            found.append((np.asarray(filled(given)), expected))
        return found

    for found in run_ranks(rank, shape[0] * shape[1], timeout=100):
        for got, expected in found:
            np.testing.assert_array_equal(got, expected)


def test_the_derivative_is_the_transpose():
    """Over all ranks, <exchange(x), y> = <x, transpose(y)>."""

    def rank():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
        x, y = block_of(dist.get_rank()), block_of(dist.get_rank() + 100)
        found = []
        for width, periodic in TWO:

            @jax.jit
            def both(x, y, width=width, periodic=periodic):
                def exchange(x):
                    return mj.exchange_halo(x, mesh, AXES, width, periodic=periodic)

                out, vjp = jax.vjp(exchange, x)
                return out, vjp(y)[0]

            out, back = both(x, y)
            found.append(((out * y).sum(), (x * back).sum()))
        return np.array(found)

    total = sum(run_ranks(rank, 4, timeout=100))
    np.testing.assert_array_equal(total[:, 0], total[:, 1])


def test_in_a_loop_and_in_vmap():
    def rank():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
        given = block_of(dist.get_rank(), (2, 5, 5))

        def one(x):
            x = mj.exchange_halo(x, mesh, {"y": 0, "x": 1}, periodic=True)
            return x.at[1:-1, 1:-1].add(x[:-2, 1:-1] + x[1:-1, 2:])

        @jax.jit
        def steps(x):
            return jax.lax.fori_loop(0, 3, lambda _, x: jax.vmap(one)(x), x)

        expected = given.copy()
        for _ in range(3):
            mesh.exchange_halo(expected, {"y": 1, "x": 2}, periodic=True)
            expected[:, 1:-1, 1:-1] += expected[:, :-2, 1:-1] + expected[:, 1:-1, 2:]
        return np.asarray(steps(given)), expected

    for got, expected in run_ranks(rank, 4, timeout=100):
        np.testing.assert_array_equal(got, expected)


def refused():
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("y", "x"))
    for arguments, kind, words in (
        (({"y": 0}, 0), ValueError, "width must be at least 1, got 0"),
        (({"y": 0}, 2), ValueError, "array has 5 cells along axis 0; expected at least 6"),
        (({"z": 0},), MeshDimError, "z"),
        (({"y": 0, "x": -2},), ValueError, r"dims\['x'\] is axis -2"),
        (("yx",), TypeError, "dims must map dims to axes"),
    ):
        with pytest.raises(kind, match=words):
            jax.jit(lambda x, given=arguments: mj.exchange_halo(x, mesh, *given))(np.zeros((5, 5)))


def test_wrong_arguments_are_named():
    run_ranks(refused, 1)
