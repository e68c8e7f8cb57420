"""DeviceMesh as a value: slices and coordinates against NumPy's, equality, flattened names."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlib._job.current import install
from meshlib._job.world import World
from meshlib._mesh.device_mesh import DeviceMesh
from meshlib._mesh.init import init_device_mesh
from meshlib._mesh.spec import MeshDimError
from tests.support.meshlib.cube import cube
from transport._communicators.runtime import Runtime
from transport._store.hash_store import HashStore

NAMES = ("a", "b", "c", "d")

# ---------------------------------------------------------------------- values against NumPy


@st.composite
def rank_arrays(draw):
    """An array of distinct ranks: 0 to n-1, a progression, or any set in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    count = math.prod(shape)
    ranks = draw(
        st.one_of(
            st.just(list(range(count))),
            st.builds(lambda start, step: [start + step * i for i in range(count)],
                      st.integers(0, 5), st.integers(2, 4)),
            st.lists(st.integers(0, 200), min_size=count, max_size=count, unique=True),
        )
    )  # fmt: skip
    return np.array(ranks).reshape(shape)


@st.composite
def meshes(draw):
    """A mesh that was through several operations, and its slices as NumPy makes them."""
    array = draw(rank_arrays())
    names = NAMES[: array.ndim]
    mesh, slices = DeviceMesh("cpu", array, mesh_dim_names=names), array[None]
    for step in range(draw(st.integers(0, 4))):
        ndim = slices.ndim - 1
        kind = draw(st.sampled_from(["select", "permute", "flatten", "unflatten", "concatenate"]))
        if kind == "select":
            chosen = draw(st.lists(st.sampled_from(range(ndim)), min_size=1, unique=True))
            mesh, slices = mesh[[mesh.mesh_dim_names[i] for i in chosen]], _select(slices, chosen)
        elif kind == "permute":
            order = draw(st.permutations(range(ndim)))
            mesh = mesh.permute(*order)
            slices = slices.transpose([0, *(i + 1 for i in order)])
        elif kind == "concatenate":
            cut = draw(st.integers(0, ndim))
            halves = [list(range(cut)), list(range(cut, ndim))]
            mesh = DeviceMesh.concatenate([mesh[half] for half in halves if half])
        elif kind == "flatten":
            mesh, slices = mesh.flatten(f"f{step}"), slices.reshape(len(slices), -1)
        else:
            i = draw(st.sampled_from(range(ndim)))
            size = slices.shape[i + 1]
            inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            sizes = (draw(st.sampled_from([-1, size // inner])), inner)
            mesh = mesh.unflatten(i, sizes, (f"u{step}", f"v{step}"))
            slices = slices.reshape(
                (*slices.shape[: i + 1], size // inner, inner, *slices.shape[i + 2 :])
            )
    return mesh, slices


def _select(slices, chosen):
    ndim = slices.ndim - 1
    rest = [i + 1 for i in range(ndim) if i not in chosen]
    together = slices.transpose([0, *rest, *(i + 1 for i in chosen)])
    return together.reshape((-1, *(slices.shape[i + 1] for i in chosen)))


def _as_set(slices):
    return {tuple(one.ravel().tolist()) for one in slices}


@given(meshes())
def test_slices_are_those_of_numpy(made):
    mesh, slices = made
    assert mesh.shape == slices.shape[1:]
    assert (mesh.ndim, mesh.size()) == (slices.ndim - 1, slices[0].size)
    assert mesh.slices().shape == slices.shape
    assert _as_set(mesh.slices()) == _as_set(slices)


@given(meshes())
def test_every_rank_knows_its_coordinates(made):
    mesh, slices = made
    for _, *coordinates in np.ndindex(*slices.shape):
        for one in slices:
            assert mesh.coordinate_of(int(one[tuple(coordinates)])) == coordinates
    for number in range(mesh.slice_count):
        one = mesh.slices()[number]
        assert [mesh.rank_at(place, number) for place in range(mesh.size())] == one.ravel().tolist()
        assert {mesh.slice_number(rank) for rank in one.ravel()} == {number}
    for stranger in {-1, 1, 201, int(slices.max()) + 1} - set(slices.ravel().tolist()):
        assert mesh.coordinate_of(stranger) is None


@given(meshes())
def test_meshes_are_values(made):
    mesh, slices = made
    assert copy.deepcopy(mesh) is mesh
    other = pickle.loads(pickle.dumps(mesh))
    assert other == mesh
    assert hash(other) == hash(mesh)
    if len(slices) == 1:
        # However the ranks are stored: an array of them is the same mesh.
        direct = DeviceMesh("cpu", slices[0], mesh_dim_names=mesh.mesh_dim_names)
        assert direct == mesh
        assert hash(direct) == hash(mesh)


@given(rank_arrays(), rank_arrays())
def test_meshes_are_equal_exactly_if_their_ranks_are(one, other):
    equal = DeviceMesh("cpu", one) == DeviceMesh("cpu", other)
    assert equal == (one.shape == other.shape and bool((one == other).all()))


def test_names_and_device_type_are_part_of_the_value():
    mesh = DeviceMesh("cpu", [0, 1])
    assert mesh != DeviceMesh("cuda", [0, 1])
    assert mesh != DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    assert mesh != "mesh"
    assert DeviceMesh("cpu", [[0, 1], [2, 3]]) == DeviceMesh.from_shape("cpu", (2, 2))
    assert DeviceMesh("cpu", [[0, 2], [1, 3]]) == DeviceMesh.from_shape("cpu", (2, 2)).permute(1, 0)
    assert DeviceMesh("CPU", [0, 1]) == mesh


def test_a_slice_is_equal_on_all_ranks_and_not_to_one_of_its_slices():
    first, second = DeviceMesh.from_shape("cpu", (2, 2)), DeviceMesh("cpu", [[0, 1], [2, 3]])
    assert first[0] == second[0] == first[-2]
    assert first[0] != first[1]
    assert first[0] != DeviceMesh("cpu", [0, 2])


def test_a_mesh_cannot_be_changed():
    mesh = cube()
    before = hash(mesh)
    for name in ("shape", "_ranks", "anything"):
        with pytest.raises(AttributeError, match=name):
            setattr(mesh, name, 1)
        with pytest.raises(AttributeError, match=name):
            delattr(mesh, name)
    mesh.mesh[:] = 7
    mesh.slices()[:] = 7
    assert mesh.mesh.ravel().tolist() == list(range(12))
    assert hash(mesh) == before


def test_the_array_that_a_mesh_was_made_from_may_change():
    array = np.array([3, 1, 2])
    mesh = DeviceMesh("cpu", array)
    array[:] = 0
    assert mesh.mesh.tolist() == [3, 1, 2]


def test_a_mesh_is_no_iterable():
    with pytest.raises(TypeError):
        list(cube())


# ---------------------------------------------------------------------- flattened names


def test_a_flattened_name_can_be_sliced_from_the_root_afterwards():
    mesh = cube()
    flat = mesh["pp", "tp"].flatten()
    assert flat.mesh_dim_names == ("pp_tp",)
    assert mesh["pp_tp"] == flat
    assert mesh["pp_tp"].slices().tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert mesh["dp", "pp_tp"].shape == (3, 4)
    assert mesh.size("pp_tp") == 4
    assert mesh["tp", "pp"].flatten("swapped").slices()[0].tolist() == [0, 6, 1, 7]
    assert mesh["dp"].flatten("replicas").slices().tolist() == mesh["dp"].slices().tolist()
    assert mesh["replicas"].mesh_dim_names == ("replicas",)


def test_a_flattened_name_survives_pickle_and_is_no_part_of_the_value():
    mesh, plain = cube(), cube()
    mesh.flatten("all")
    assert mesh == plain
    assert hash(mesh) == hash(plain)
    assert pickle.loads(pickle.dumps(mesh))["all"] == mesh["all"]
    with pytest.raises(MeshDimError, match="'all' is not there"):
        plain["all"]


def test_a_name_keeps_its_meaning():
    mesh = cube()
    mesh["pp", "dp"].flatten("x")
    mesh["pp", "dp"].flatten("x")
    with pytest.raises(MeshDimError, match="'x' names other ranks"):
        mesh["dp", "pp"].flatten("x")
    with pytest.raises(MeshDimError, match="'tp' names other ranks"):
        mesh["pp", "dp"].flatten("tp")


def test_a_flattened_name_is_found_in_slices_that_hold_it():
    mesh = cube()
    mesh["dp", "tp"].flatten("inner")
    assert mesh["tp", "dp"]["inner"] == mesh["inner"]
    assert mesh["inner"]["tp"] == mesh["tp"]
    with pytest.raises(MeshDimError, match=r"'inner' is not inside this slice \(dp=3\)"):
        mesh["dp"]["inner"]
    with pytest.raises(MeshDimError, match=r"'pp' is not inside this slice \(dp=3 × tp=2\)"):
        mesh["dp", "tp"]["pp"]


def test_threads_that_flatten_at_once_agree_on_one_meaning():
    for _ in range(20):
        mesh = cube()
        outcomes: list[object] = []
        start = threading.Barrier(4, timeout=60)

        def flatten(order, mesh=mesh, outcomes=outcomes, start=start):
            part = mesh[order]
            start.wait()
            try:
                outcomes.append((order, part.flatten("x")))
            except MeshDimError:
                outcomes.append(None)

        orders = [("pp", "dp"), ("dp", "pp"), ("pp", "dp"), ("dp", "tp")]
        threads = [threading.Thread(target=flatten, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        won = [outcome for outcome in outcomes if outcome is not None]
        assert len({order for order, _ in won}) == 1
        assert all(flat == mesh["x"] for _, flat in won)


def test_unflatten_inherits_options_and_keeps_the_rest():
    mesh = DeviceMesh.from_shape(
        "cpu", (2, 6), mesh_dim_names=("pp", "dp"), timeout_override={"dp": "5s"}
    )
    finer = mesh.unflatten("dp", (3, -1), ("dp_replicate", "dp_shard"))
    assert finer.shape == (2, 3, 2)
    assert finer.mesh_dim_names == ("pp", "dp_replicate", "dp_shard")
    assert finer["dp"] == mesh["dp"]
    assert finer["dp_replicate", "dp_shard"].flatten("dp") == mesh["dp"]
    assert mesh.split("dp", (3, 2), ("x", "y")).shape == (2, 3, 2)
    assert [dim.options.timeout for dim in finer._dims] == [None, 5.0, 5.0]


def test_any_factors_will_do_for_unflatten():
    flat = DeviceMesh("cpu", np.arange(4 * 5 * 6).reshape(4, 5, 6), mesh_dim_names=NAMES[:3])[
        "a", "c"
    ].flatten("ac")
    again = flat.unflatten("ac", (6, 4), ("x", "y"))
    assert again.shape == (6, 4)
    expected = flat.slices().reshape(5, 6, 4)
    assert _as_set(again.slices()) == _as_set(expected)
    assert again["y"].size() == 4
    assert again.slices().reshape(5, 24).tolist() == flat.slices().tolist()


# ---------------------------------------------------------------------- a very large mesh


def test_a_million_ranks_cost_memory_for_this_ranks_members_only():
    store = HashStore()
    store.add("arrived", 2**20 - 1)
    world = World(
        store, 777_777, 2**20, runtime=Runtime(), backends={"cpu": "inproc"}, timeout=10.0
    ).join()
    install(world, thread_only=True)
    try:
        tracemalloc.start()
        mesh = init_device_mesh("cpu", (64, 128, 128), mesh_dim_names=("pp", "dp", "tp"))
        sliced = mesh["tp", "pp"]
        groups = mesh.get_all_groups()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [len(group.ranks) for group in groups] == [64, 128, 128]
        assert sliced.shape == (128, 64)
        assert mesh.get_coordinate() == list(np.unravel_index(777_777, (64, 128, 128)))
        assert groups[1].ranks[0] == 777_777 - 128 * mesh.get_local_rank("dp")
        assert peak < 1_000_000  # of the ranks' 8 MB as an array, next to nothing
    finally:
        install(None, thread_only=True)
        world.close(drain=0.0, linger=0.0)


class TestWithout:
    """``mesh.without(ranks, dim)``: the coordinates of a dim that hold a lost rank leave."""

    def mesh(self):
        return DeviceMesh.from_shape(
            "cpu",
            (3, 2, 2),
            mesh_dim_names=("dp", "cp", "tp"),
            timeout_override={"tp": 7.0},
        )

    def test_slices_that_hold_a_lost_rank_leave(self):
        mesh = self.mesh()
        smaller = mesh.without([5], "dp")
        assert smaller.shape == (2, 2, 2)
        assert smaller.mesh_dim_names == mesh.mesh_dim_names
        assert smaller.mesh.ravel().tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
        assert mesh.without([0, 11], 0).mesh.ravel().tolist() == [4, 5, 6, 7]
        assert mesh.without([5], "tp").mesh.ravel().tolist() == [0, 2, 4, 6, 8, 10]
        assert smaller.without([9, 4], "dp").mesh.ravel().tolist() == [0, 1, 2, 3]

    def test_it_is_a_value(self):
        mesh = self.mesh()
        assert mesh.without([5], "dp") == mesh.without([4, 6], "dp")
        assert hash(mesh.without([5], "dp")) == hash(mesh.without([4], "dp"))
        assert mesh.without([], "dp") is mesh
        assert mesh.without([99], "dp") is mesh
        assert mesh.without([0], "dp") == mesh.with_ranks(np.arange(4, 12).reshape(2, 2, 2))
        assert mesh == self.mesh()

    def test_of_a_slice_every_slice_is_smaller(self):
        mesh = self.mesh()["dp", "tp"]
        smaller = mesh.without([5], "dp")
        assert smaller.slices().tolist() == [[[0, 1], [8, 9]], [[2, 3], [10, 11]]]

    def test_names_and_options_stay(self):
        mesh = self.mesh()
        mesh["dp", "cp"].flatten("dp_cp")
        smaller = mesh.without([5], "dp")
        assert smaller["dp_cp"].slices().tolist() == [[0, 2, 8, 10], [1, 3, 9, 11]]
        assert smaller["tp"]._dims[0].options == mesh["tp"]._dims[0].options
        moved = mesh.with_ranks([[[4], [1]]])
        assert moved["dp_cp"].mesh.tolist() == [4, 1]

    def test_wrong_arguments(self):
        mesh = self.mesh()
        with pytest.raises(ValueError, match=r"without ranks \[1, 5, 9\] nothing is left"):
            mesh.without([1, 5, 9], "dp")
        with pytest.raises(MeshDimError, match="dq"):
            mesh.without([1], "dq")
        with pytest.raises(TypeError, match="ranks"):
            mesh.without(["1"], "dp")
        with pytest.raises(ValueError, match="ranks has 2 dims; expected 3"):
            mesh.with_ranks([[0, 1]])
