"""``Sharding`` as a value, and who has which part of an array: arithmetic alone."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as dist
from meshlib.sharding import P, Partial, Replicate, Shard, Sharding
from meshlib.testing import run_ranks
from tests.support.meshlib.sharding_cases import NAMES, meshes, named_mesh, shardings

MESH = named_mesh(2, 3, 2)


def split_by_hand(array, counts):
    """Return the parts of dim 0 by ceiling division, as torch.chunk does."""
    chunk = max(-(-len(array) // counts), 1)
    return [array[i * chunk : (i + 1) * chunk] for i in range(counts)]


def parts_by_hand(array, sharding):
    """Return each rank's part by splitting the array in NumPy, one mesh dim after the other."""
    parts = {}
    for rank in range(sharding.mesh.size()):
        coordinate = sharding.mesh.coordinate_of(rank)
        part = array
        for array_dim, mesh_dims in enumerate(sharding.dims):
            for i in mesh_dims:
                moved = np.moveaxis(part, array_dim, 0)
                chosen = split_by_hand(moved, sharding.mesh.shape[i])[coordinate[i]]
                part = np.moveaxis(chosen, 0, array_dim)
        parts[rank] = part
    return parts


@st.composite
def arrays_on_meshes(draw):
    mesh = draw(meshes())
    shape = draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
    return np.arange(np.prod(shape, dtype=int)).reshape(shape), draw(shardings(mesh, len(shape)))


@given(arrays_on_meshes())
def test_each_rank_has_what_numpy_gives_by_splitting(case):
    array, sharding = case
    for rank, part in parts_by_hand(array, sharding).items():
        np.testing.assert_array_equal(array[sharding.slices(array.shape, rank)], part)
        assert sharding.local_shape(array.shape, rank) == part.shape


@given(arrays_on_meshes())
def test_the_parts_are_the_array_and_the_first_replicas_have_each_once(case):
    array, sharding = case
    once, by_rank = np.zeros(array.shape, int), np.zeros(array.shape, int)
    for part in sharding.parts(array.shape):
        once[part] += 1
    assert (once == 1).all()
    replicas = [sharding.replica(rank) for rank in range(sharding.mesh.size())]
    for rank, number in enumerate(replicas):
        if number == 0:
            by_rank[sharding.slices(array.shape, rank)] += 1
    partial = np.prod([sharding.mesh.shape[i] for i, _ in sharding.partial_dims], dtype=int)
    assert (by_rank == partial).all()
    assert sorted(set(replicas)) == list(range(sharding.replica_count))


@given(arrays_on_meshes())
def test_a_sharding_is_one_value_however_it_is_written(case):
    _, sharding = case
    again = Sharding(sharding.mesh, sharding.spec, sharding.partial)
    other = pickle.loads(pickle.dumps(sharding))
    assert sharding == again == other
    assert hash(sharding) == hash(again) == hash(other)
    in_order = all(list(dim) == sorted(dim) for dim in sharding.dims)
    if in_order:
        assert Sharding(sharding.mesh, sharding.placements) == sharding
    else:
        with pytest.raises(ValueError, match="another order"):
            sharding.placements  # noqa: B018


@pytest.mark.parametrize("name", ["mesh", "dims", "spec", "note"])
def test_a_sharding_does_not_change(name):
    sharding = Sharding(MESH, P("a"))
    with pytest.raises(AttributeError, match=f"a Sharding is immutable; '{name}' cannot be set"):
        setattr(sharding, name, None)
    with pytest.raises(AttributeError, match=f"immutable; '{name}' cannot be deleted"):
        delattr(sharding, name)


def test_jaxs_manner_and_torchs_give_equal_values():
    mesh = dist.DeviceMesh.from_shape("cpu", (2, 2, 2), mesh_dim_names=("dp", "dp2", "tp"))
    ours = Sharding(mesh, P("dp", None, ("dp2", "tp")))
    assert ours == Sharding(mesh, [Shard(0), Shard(2), Shard(2)])
    assert ours == Sharding(mesh, ("dp", None, ["dp2", "tp"]))
    assert ours != Sharding(mesh, P("dp", None, ("tp", "dp2")))
    assert ours.spec == P("dp", None, ("dp2", "tp"))
    partial = Sharding(mesh, [Shard(0), Replicate(), Partial("max")])
    assert partial == Sharding(mesh, P("dp", None), partial={"tp": "max"})
    assert partial == Sharding(mesh, P(0), partial={-1: dist.ReduceOp.MAX})
    assert len({ours, partial, Sharding(mesh, P("dp"), {"tp": "max"})}) == 2
    assert Sharding(mesh, P("dp"), "tp") == Sharding(mesh, [Shard(0), Replicate(), Partial()])


def test_jaxs_own_specs_are_read():
    jax_sharding = pytest.importorskip("jax.sharding")
    spec = jax_sharding.PartitionSpec("a", None, ("b", "c"))
    assert Sharding(MESH, spec) == Sharding(MESH, P("a", None, ("b", "c")))
    unreduced = jax_sharding.PartitionSpec("a", unreduced={"b"})
    assert Sharding(MESH, unreduced) == Sharding(MESH, P("a"), "b")
    with pytest.raises(TypeError, match="UNCONSTRAINED"):
        Sharding(MESH, jax_sharding.PartitionSpec(jax_sharding.PartitionSpec.UNCONSTRAINED))


def test_a_flattened_name_stands_for_its_dims():
    mesh = named_mesh(2, 3, 2)
    mesh["c", "a"].flatten("ca")
    assert Sharding(mesh, P("ca")) == Sharding(mesh, P(("c", "a")))


def test_both_orders_of_two_mesh_dims_on_one_array_dim():
    outer_first, inner_first = (Sharding(MESH, P(names)) for names in (("a", "b"), ("b", "a")))
    starts = [
        [s.slices([12], r)[0].start for r in range(0, 12, 2)] for s in (outer_first, inner_first)
    ]
    assert starts == [[0, 2, 4, 6, 8, 10], [0, 4, 8, 2, 6, 10]]


def test_few_rows_on_many_ranks_leave_some_empty():
    mesh = dist.DeviceMesh.from_shape("cpu", (4,))
    lengths = [[Sharding(mesh, P(0)).local_shape([n], r)[0] for r in range(4)] for n in (5, 1, 0)]
    assert lengths == [[2, 2, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_a_mesh_of_a_million_ranks_takes_no_memory_for_them():
    mesh = dist.DeviceMesh.from_shape("cpu", (100, 100, 100), mesh_dim_names=NAMES)
    sharding = Sharding(mesh, P(("c", "a"), "b"))
    assert sharding.slices((10**6, 10**4), 123_456) == (slice(561_200, 561_300), slice(3400, 3500))
    assert sharding.replica_count == 1


def test_a_slice_of_a_mesh_and_ranks_outside():
    mesh = dist.DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("dp", "tp"))
    sharding = Sharding(mesh["tp"], P("tp"))
    assert [sharding.slices([4], rank) for rank in (4, 5, 6, 7)] == [
        (slice(0, 2),),
        (slice(2, 4),),
    ] * 2
    with pytest.raises(ValueError, match="rank 3 is not in"):
        sharding.slices([4], 3)


def test_this_rank_is_the_default():
    sharding = Sharding(MESH, P(None, ("b", "c", "a")))

    def program():
        return sharding.local_shape((2, 40)), sharding.replica()

    assert run_ranks(program, 12) == [(sharding.local_shape((2, 40), r), 0) for r in range(12)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((P("a", "a"),), ValueError, "'a'.*twice"),
        ((P("a"), "a"), ValueError, "'a'.*twice"),
        ((P(("b", "b")),), ValueError, "'b'.*twice"),
        ((P("d"),), dist.MeshDimError, "'d' is not there"),
        ((P(3),), dist.MeshDimError, "3 is not there"),
        ((P(), {"d": "sum"}), dist.MeshDimError, "'d' is not there"),
        ((P(), {"a": "mean"}), ValueError, "'mean'"),
        ((P(), {"a": "sum", "b": "max"}), ValueError, "max, sum"),
        (([Shard(0), Replicate()],), ValueError, "3 dims"),
        (([Shard(0), None, Replicate()],), ValueError, "one placement for each"),
        (("a",), TypeError, "spec is 'a'"),
        ((P,), TypeError, "spec is"),
    ],
)
def test_a_wrong_spec_is_an_error_that_names_it(arguments, error, message):
    with pytest.raises(error, match=message):
        Sharding(MESH, *arguments)


def test_wrong_shapes_and_meshes():
    with pytest.raises(TypeError, match="mesh is None"):
        Sharding(None, P())
    with pytest.raises(ValueError, match=r"has 1 dims.*splits dim 1"):
        Sharding(MESH, P(None, "a")).slices([4], 0)
    with pytest.raises(ValueError, match="at least 0"):
        Sharding(MESH, P("a")).slices([-4], 0)
    with pytest.raises(ValueError, match="count array dims from the first"):
        Shard(-1)
    with pytest.raises(TypeError, match=r"1\.5"):
        P(1.5)
    with pytest.raises(AttributeError, match="a Sharding is immutable"):
        Sharding(MESH, P()).mesh = MESH


@given(meshes(max_dims=2), st.data())
def test_dtensor_has_the_same_shapes(mesh, data):
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    tensor = pytest.importorskip("torch.distributed.tensor")
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    choices = [Replicate(), *map(Shard, range(len(shape)))]
    placements = [data.draw(st.sampled_from(choices)) for _ in mesh.shape]
    theirs = [
        tensor.Shard(p.dim) if isinstance(p, Shard) else tensor.Replicate() for p in placements
    ]
    sharding = Sharding(mesh, placements)
    for coordinate in itertools.product(*map(range, mesh.shape)):
        local, offset = utils._compute_local_shape_and_global_offset(
            tuple(shape), mesh.shape, list(coordinate), theirs
        )
        ours = sharding.slices_at(shape, coordinate)
        assert tuple(local) == tuple(s.stop - s.start for s in ours)
        if all(local):
            assert tuple(offset) == tuple(s.start for s in ours)
