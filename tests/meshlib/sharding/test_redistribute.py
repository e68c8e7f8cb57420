"""Arrays laid out anew, by ranks as threads, against slices of the global array."""

import random

import numpy as np
import pytest

import meshlib as dist
from meshlib.sharding import DArray, P, Sharding, distribute_array
from meshlib.sharding._redistribution import exchange
from meshlib.testing import RankError, run_ranks
from tests.support.meshlib.sharding_cases import (
    draw_sharding,
    made_by_hand,
    named_mesh,
    value_by_hand,
)

PAIRS = 40
SHAPES = [(), (7,), (8, 6), (5, 1), (3, 4, 5), (0, 4), (2, 3)]


def pairs_on(mesh, seed, other_mesh=None):
    """Return pairs of shardings of one shape, drawn by chance that is the same each time."""
    chance = random.Random(seed)
    pairs = []
    for _ in range(PAIRS):
        shape = chance.choice(SHAPES)
        both = (draw_sharding(chance, m, len(shape)) for m in (mesh, other_mesh or mesh))
        pairs.append((shape, *both))
    return pairs


def check(pairs, world_size, async_op, backend="inproc"):
    def program():
        results = []
        for shape, source, target in pairs:
            local = made_by_hand(shape, source, dist.get_rank())
            before = None if local is None else local.copy()
            x = DArray(local, source, shape, float)
            if async_op:
                results.append((x.redistribute(target, async_op=True), before, local))
            else:
                results.append((x.redistribute(target), before, local))
        if async_op:
            results = [(work.result(), before, local) for work, before, local in results]
        for y, before, local in results:
            np.testing.assert_array_equal(before, local)
            if y.to_local() is not None:
                assert y.to_local().dtype == float
                assert y.to_local().flags.c_contiguous or y.to_local() is local
        return [y.to_local() for y, _, _ in results]

    locals_ = run_ranks(program, world_size, backend=backend)
    for i, (shape, source, target) in enumerate(pairs):
        parts = [locals_[rank][i] for rank in range(world_size)]
        for rank, part in enumerate(parts):
            inside = target.mesh.coordinate_of(rank) is not None
            assert (part is not None) == inside
            if inside:
                assert part.shape == target.local_shape(shape, rank), (shape, source, target)
        expected, found = value_by_hand(shape), {}
        for rank in range(world_size):
            if parts[rank] is not None:
                value = reduced_by_hand(parts, target, rank)
                found[rank] = value
                wanted = expected[target.slices(shape, rank)]
                np.testing.assert_array_equal(value, wanted, f"{shape} {source} {target} {rank}")


def reduced_by_hand(parts, sharding, rank):
    value = parts[rank]
    mesh = sharding.mesh
    at = mesh.coordinate_of(rank)
    partial = dict(sharding.partial_dims)
    if not partial:
        return value
    mates = [
        r
        for r in range(len(parts))
        if (c := mesh.coordinate_of(r)) is not None
        and all(c[i] == at[i] for i in range(mesh.ndim) if i not in partial)
    ]
    (op,) = set(partial.values())
    return {"sum": np.sum, "max": np.max}[op]([parts[r] for r in mates], axis=0)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 2), (2, 3), (2, 1, 2), (2, 2, 2)])
def test_from_any_sharding_to_any_other_on_one_mesh(mesh_shape, async_op):
    mesh = named_mesh(*mesh_shape)
    check(pairs_on(mesh, str(mesh_shape)), mesh.size(), async_op)


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_the_same_where_parts_are_read_as_they_lie(mesh_shape):
    mesh = named_mesh(*mesh_shape)
    check(pairs_on(mesh, f"shm {mesh_shape}"), mesh.size(), False, backend="shm")


MESHES = [
    ("overlapping", dist.DeviceMesh("cpu", [0, 1, 2]), dist.DeviceMesh("cpu", [[4, 2], [1, 3]])),
    ("disjoint", dist.DeviceMesh("cpu", [[0, 1]]), dist.DeviceMesh("cpu", [[4, 2], [5, 3]])),
    ("turned", dist.DeviceMesh("cpu", [[0, 1], [2, 3]]), dist.DeviceMesh("cpu", [3, 0, 1, 2])),
    ("smaller", dist.DeviceMesh("cpu", [[0, 1], [2, 3]]), dist.DeviceMesh("cpu", [2, 1])),
]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(("name", "mesh", "other"), MESHES)
def test_from_one_mesh_to_another(name, mesh, other, async_op):
    check(pairs_on(mesh, name, other), 6, async_op)


def test_many_redistributions_under_way_do_not_get_mixed_up():
    mesh = named_mesh(2, 2)
    ways = [P("a"), P(None, "b"), P(("b", "a")), P("b", "a"), P()]

    def program():
        x = distribute_array(np.arange(48.0).reshape(8, 6), Sharding(mesh, P("a", "b")))
        works = [x.redistribute(way, async_op=True) for way in ways * 5]
        total = mesh.all_reduce(np.ones(1))
        return [w.result().full_array().sum() for w in reversed(works)], total[0]

    assert run_ranks(program, 4) == [([1128.0] * 25, 4.0)] * 4


@pytest.fixture
def short_rounds(monkeypatch):
    monkeypatch.setattr(exchange, "ROUND_BYTES", 64)
    exchange.members_of.cache_clear()
    yield
    exchange.members_of.cache_clear()


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_what_does_not_lie_in_one_piece_travels_in_rounds(mesh_shape, short_rounds):
    mesh = named_mesh(*mesh_shape)
    pairs = pairs_on(mesh, f"rounds {mesh_shape}")
    check(pairs, mesh.size(), async_op=False)
    steps = [step for shape, a, b in pairs for step in a.plan(b, shape).steps]
    assert any(
        exchange.members_of(step, (8, 6), tuple(range(mesh.size()))).rounds(8) > 1
        for step in steps
        if step.kind in ("all_to_all", "all_gather") and len(step.mesh_dims) == mesh.ndim
        if max(map(len, (step.source.dims, step.target.dims))) <= 2
    )


def test_what_needs_no_move_is_the_same_array_and_what_does_never_shares_memory():
    mesh = named_mesh(2)

    def program():
        x = distribute_array(np.arange(8.0), Sharding(mesh, P()))
        assert x.redistribute(P()) is x
        y = x.redistribute(P("a"))
        z = y.redistribute(Sharding(named_mesh(2), P("a")))
        assert z is y
        return np.shares_memory(x.local, y.local), np.shares_memory(x.local, x.full_array())

    assert run_ranks(program, 2) == [(False, False)] * 2


def test_an_op_that_does_not_apply_is_an_error_before_any_byte_moves():
    mesh = named_mesh(2)

    def program():
        x = DArray(np.ones(2, int), Sharding(mesh, P(), {"a": "avg"}), (2,), int)
        with pytest.raises(TypeError, match="AVG"):
            x.full_array()
        return mesh.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_ranks_that_redistribute_differently_all_raise():
    mesh = named_mesh(2)

    def program():
        x = distribute_array(np.ones((4, 4, 4)), Sharding(mesh, P("a")))
        with pytest.raises(dist.CollectiveMismatchError):
            x.redistribute(P(None, "a") if dist.get_rank() else P(None, None, "a"))

    run_ranks(program, 2)


def test_meshes_of_the_same_ranks_in_other_shapes_are_told_apart():
    square, line = named_mesh(2, 2), dist.DeviceMesh("cpu", [0, 1, 2, 3])

    def program():
        mesh, split = (line, P(0)) if dist.get_rank() == 2 else (square, P(("a", "b")))
        x = DArray.from_local(np.ones(1), Sharding(mesh, split), (4,), run_check=False)
        with pytest.raises(dist.CollectiveMismatchError):
            x.full_array()

    run_ranks(program, 4)


def test_a_slice_of_a_mesh_has_an_array_for_each_slice():
    mesh = named_mesh(2, 2)

    def program():
        x = distribute_array(np.full(4, dist.get_rank() // 2), Sharding(mesh["b"], P("b")))
        other = Sharding(dist.DeviceMesh("cpu", [0, 1, 2, 3]), P(0))
        with pytest.raises(ValueError, match="2 slices"):
            x.redistribute(other)
        return x.full_array().tolist()

    assert run_ranks(program, 4) == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]


def test_what_is_no_sharding():
    def program():
        x = distribute_array(np.ones(4), Sharding(named_mesh(2), P("a")))
        with pytest.raises(dist.MeshDimError, match="'z'"):
            x.redistribute(P("z"))
        with pytest.raises(ValueError, match="has 1 dims"):
            x.redistribute(P(None, "a"))

    run_ranks(program, 2)
    with pytest.raises(RankError, match="twice"):
        run_ranks(lambda: Sharding(named_mesh(2), P("a", "a")), 2)
