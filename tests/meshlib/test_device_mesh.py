"""DeviceMesh: its values against NumPy, its groups on ranks as threads, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import tracemalloc
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as dist
from meshlib import mesh_config
from meshlib.device_mesh import DeviceMesh, current_mesh
from meshlib.init_mesh import init_device_mesh
from meshlib.mesh_spec import MeshDimError
from meshlib.testing import run_ranks
from meshlib.world import World, current_world, install
from transport.runtime import Runtime
from transport.store.hash_store import HashStore

NAMES = ("a", "b", "c", "d")


def cube() -> DeviceMesh:
    return DeviceMesh.from_shape("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))


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
        start = threading.Barrier(4, timeout=10)

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
            thread.join(10)
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
    )
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


# ---------------------------------------------------------------------- on ranks


def test_a_mesh_finds_this_ranks_groups():
    mesh = cube()  # one object, shared by all ranks

    def rank():
        assert mesh.get_rank() == dist.get_rank()
        for name in ("pp", "dp", "tp"):
            group = mesh.get_group(name)
            assert group.rank() == mesh.get_local_rank(name)
            assert group.ranks == tuple(mesh[name].mesh.tolist())
            assert mesh[name].get_group() is group
            assert mesh[name].process_group is group
        assert mesh.get_all_groups() == [mesh.get_group(i) for i in range(3)]
        assert mesh.process_group is current_world().default_group
        assert cube().get_group("dp") is mesh.get_group("dp")
        swapped = mesh["tp", "dp"]
        assert swapped.process_group.ranks == tuple(swapped.mesh.ravel().tolist())
        assert mesh["dp"] is mesh["dp"]
        x = np.array([dist.get_rank()])
        mesh["pp"].all_reduce(x)
        return mesh.get_coordinate(), x[0]

    for number, (coordinate, total) in enumerate(run_ranks(rank, 12)):
        assert coordinate == list(np.unravel_index(number, (2, 3, 2)))
        assert total == number % 6 + number % 6 + 6


def test_collectives_over_irregular_ranks_in_any_order():
    def rank():
        mesh = DeviceMesh("cpu", [[5, 0, 3], [2, 4, 1]], mesh_dim_names=("row", "col"))
        mine = np.array([dist.get_rank()])
        rows = [np.zeros(1, int) for _ in range(3)]
        mesh["col"].all_gather(rows, mine)
        mesh.broadcast(mine, src=3)
        flat = mesh["col", "row"].flatten("all")
        gathered = [np.zeros(1, int) for _ in range(6)]
        flat.all_gather(gathered, np.array([flat.get_local_rank()]))
        return [int(x[0]) for x in rows], int(mine[0]), [int(x[0]) for x in gathered]

    for number, (row, sent, order) in enumerate(run_ranks(rank, 6)):
        assert row == ([5, 0, 3] if number in (5, 0, 3) else [2, 4, 1])
        assert sent == 3
        assert order == list(range(6))


def test_a_rank_outside_may_hold_slice_and_print_but_has_no_group():
    def rank():
        mesh = DeviceMesh("cpu", [[1, 3], [4, 0]], mesh_dim_names=("dp", "tp"))
        part = mesh["tp"]
        shown = (repr(mesh), repr(part))
        if dist.get_rank() != 2:
            part.barrier()
            return None
        assert mesh.get_coordinate() is None
        assert part.get_coordinate() is None
        assert mesh.mesh.tolist() == [[1, 3], [4, 0]]
        assert mesh.all_reduce(np.ones(1)) is None
        assert part.all_reduce(np.ones(1)) is None
        assert dist.get_rank(mesh) == -1
        assert dist.get_world_size(part) == -1
        for ask in (
            lambda: mesh.get_group("dp"),
            mesh.get_all_groups,
            lambda: mesh.get_local_rank("dp"),
            lambda: part.mesh,
        ):
            with pytest.raises(ValueError, match="rank 2 is not in"):
                ask()
        return shown

    (shown,) = (one for one in run_ranks(rank, 5) if one)
    assert shown == (
        "DeviceMesh(cpu, dp=2 × tp=2, ranks [1, 3, 4, 0])",
        "DeviceMesh(cpu, tp=2, one of 2 slices, the first with ranks [1, 3])",
    )


def test_repr_shows_this_ranks_slice_and_abbreviates():
    def rank():
        return repr(DeviceMesh.from_shape("cpu", (2, 1))[0]), repr(cube()["dp"])

    assert run_ranks(rank, 1) == [
        ("DeviceMesh(cpu, 2, ranks [0, 1])", "DeviceMesh(cpu, dp=3, ranks [0, 2, 4])")
    ]
    line = DeviceMesh("cpu", range(3, 20), mesh_dim_names=("dp",))
    assert repr(line) == "DeviceMesh(cpu, dp=17, ranks [3, 4, 5, 6, …, 19])"


def test_groups_are_found_anew_in_each_job_and_after_destruction():
    mesh = cube()

    def rank():
        group = mesh.get_group("tp")
        assert group.world is current_world()
        dist.barrier()
        dist.destroy_process_group(group)
        assert mesh.get_group("tp") is not group
        return True

    assert all(run_ranks(rank, 12))
    assert all(run_ranks(rank, 12))
    assert len(mesh["tp"]._groups) <= 12, "what belongs to ended jobs is kept"


def test_options_reach_the_groups():
    def rank():
        mesh = init_device_mesh(
            "cpu",
            (2, -1),
            mesh_dim_names=("dp", "tp"),
            timeout=timedelta(minutes=2),
            timeout_override={"tp": "500ms"},
            backend="inproc",
        )
        flat = mesh.flatten("flat", timeout=7)
        timeouts = [
            mesh.get_group("dp").timeout,
            mesh.get_group("tp").timeout,
            mesh.process_group.timeout,
            flat.process_group.timeout,
            mesh["flat"].process_group.timeout,
            mesh["tp"].flatten("t").process_group.timeout,
            DeviceMesh("cpu", [0, 1, 2, 3]).process_group.timeout,
        ]
        return [one.total_seconds() for one in timeouts]

    assert run_ranks(rank, 4, call_timeout=20) == [[120, 0.5, 120, 7, 7, 0.5, 20]] * 4


def test_from_group_goes_through_the_groups_it_was_given():
    def rank():
        me = dist.get_rank()
        row = dist.new_group([me // 2 * 2, me // 2 * 2 + 1])
        column = dist.new_group([me % 2, me % 2 + 2])
        mesh = DeviceMesh.from_group(
            [column, row], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")
        )
        assert mesh.get_group("dp") is column
        assert mesh["tp"].process_group is row
        assert mesh.process_group is current_world().default_group
        assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert pickle.loads(pickle.dumps(mesh)).get_group("tp") is not row
        line = DeviceMesh.from_group(row, "cpu")
        assert line.get_group() is row
        assert line.mesh.tolist() == list(row.ranks)
        assert line == DeviceMesh.from_group(row, "cpu", list(row.ranks))
        for groups, ranks, said in (
            ([row, column], [[0, 1], [2, 3]], "group 0 has the ranks"),
            ([row, column], None, "mesh is missing"),
            ([row], [[0, 1], [2, 3]], "mesh has 2 dims; expected one for each group, that is 1"),
            (row, [3, 2, 1, 0], "group 0 has the ranks"),
            (row, [[0, 1]], "mesh has 2 dims"),
            ([], [0], "expected one for each group, that is 0"),
        ):
            with pytest.raises(ValueError, match=said):
                DeviceMesh.from_group(groups, "cpu", ranks)
        with pytest.raises(TypeError, match="group has 3; expected a ProcessGroup"):
            DeviceMesh.from_group([3], "cpu", [0])
        x = np.array([me])
        mesh["tp"].all_reduce(x)
        return int(x[0])

    assert run_ranks(rank, 4) == [1, 1, 5, 5]


def test_with_makes_a_mesh_current_for_its_thread():
    def rank():
        outer, inner = cube(), cube()["dp"]
        with pytest.raises(ValueError, match="no current mesh"):
            current_mesh()
        with outer as entered:
            assert entered is outer is current_mesh()
            with suppress(ZeroDivisionError), inner:
                assert current_mesh() is inner
                raise ZeroDivisionError
            assert current_mesh() is outer
        with pytest.raises(ValueError, match="no current mesh"):
            current_mesh()
        return True

    assert all(run_ranks(rank, 2))


def test_the_end_of_a_with_block_survives_the_end_of_the_job():
    world = World(HashStore(), 0, 1, runtime=Runtime(), backends={"cpu": "inproc"}, timeout=10.0)
    install(world, thread_only=True)
    try:
        with DeviceMesh("cpu", [0]):
            dist.destroy_process_group()
        assert not dist.is_initialized()
    finally:
        install(None, thread_only=True)


# ---------------------------------------------------------------------- init_device_mesh


def test_the_job_is_joined_if_that_was_not_done(monkeypatch):
    joined = []

    def join():
        joined.append(
            World(HashStore(), 0, 1, runtime=Runtime(), backends={"cpu": "inproc"}, timeout=10.0)
        )
        install(joined[0], thread_only=True)

    monkeypatch.setattr(mesh_config, "init_process_group", join)
    try:
        with pytest.raises(ValueError, match="'dim 0' is 0"):
            init_device_mesh("cpu", (0,))
        assert not joined, "a wrong shape must be refused before anything is started"
        assert init_device_mesh("cpu", (-1,)).shape == (1,)
        assert init_device_mesh("cpu", (1, 1)).get_coordinate() == [0, 0]
        assert len(joined) == 1
    finally:
        if joined:
            dist.destroy_process_group()


def test_a_mesh_without_names():
    mesh = DeviceMesh.from_shape("cpu", (2, 3, 2))
    assert mesh.mesh_dim_names is None
    assert mesh[2, 0].shape == mesh[-1, 0].shape == (2, 2)
    assert mesh.unflatten(1, (-1, 1)).shape == (2, 3, 1, 2)
    assert mesh.flatten().mesh_dim_names is None
    mesh[0, 1].flatten("outer")
    assert mesh["outer"].shape == (6,)
    with pytest.raises(MeshDimError, match="have names, but others"):
        mesh["outer", 2]
    with pytest.raises(ValueError, match="but the mesh has no names"):
        mesh.unflatten(1, (3, 1), ("x", "y"))


def test_without_arguments_the_mesh_is_that_of_the_launcher(monkeypatch):
    monkeypatch.setenv("MESHLIB_MESH", "dp=2,tp=-1")

    def rank():
        return init_device_mesh()

    expected = DeviceMesh.from_shape("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert run_ranks(rank, 6) == [expected] * 6


def test_the_launchers_mesh_may_be_a_file(monkeypatch, tmp_path):
    path = tmp_path / "train.toml"
    path.write_text('[mesh]\ndp = 2\ntp = -1\ntimeout = "7s"\n[mesh.flatten]\nall = ["dp", "tp"]\n')
    monkeypatch.setenv("MESHLIB_MESH", str(path))

    def rank():
        mesh = init_device_mesh()
        return mesh.shape, mesh["all"].size(), mesh["tp"].process_group.timeout.total_seconds()

    assert run_ranks(rank, 6) == [((2, 3), 6, 7.0)] * 6


@pytest.mark.parametrize(
    ("environment", "arguments", "names", "said"),
    [
        (None, (), None, "environment variable MESHLIB_MESH"),
        ("dp=2;tp=2", (), None, "environment variable MESHLIB_MESH: mesh 'dp=2;tp=2'"),
        ("/no/mesh.toml", (), None, "MESHLIB_MESH: [Errno 2] No such file"),
        ("dp=3", (), None, "dp=3 needs 3 ranks, but the world size is 4"),
        (None, (), ("dp",), "mesh_dim_names is given without mesh_shape"),
        (None, ("cpu", (3, 2)), None, "3 × 2 needs 6 ranks, but the world size is 4"),
        (None, ("cpu", (2,)), None, "2 needs 2 ranks, but the world size is 4"),
        (None, ("cpu", (3, -1)), ("dp", "tp"), "product 3, which does not divide 4, the world"),
        (None, ("cpu", (-1, -1)), None, "2 degrees are -1"),
        (None, ("cpu", (2, 0)), None, "'dim 1' is 0"),
        (None, ("cpu", (2, True)), None, "'dim 1' is True"),
        (None, ("cpu", (2, 2.0)), None, "'dim 1' is 2.0"),
        (None, ("cpu", ()), None, "mesh_shape is empty"),
        (None, ("cpu", "22"), None, "mesh_shape '22' is a string"),
        (None, ("cpu", 4), None, "mesh_shape 4 is no sequence"),
        (None, ("cpu", (2, 2)), ("dp",), "has 1 names, expected one for each of 2 dims"),
        (None, ("cpu", (2, 2)), ("dp", "dp"), "'dp' is there twice"),
        (None, ("cpu", (2, 2)), ("dp", ""), "'' is not a non-empty string"),
        (None, ("cpu", (2, 2)), "ab", "mesh_dim_names 'ab' is a string"),
        (None, ("cuda:0", (2, 2)), None, "device_type is 'cuda:0'; expected one of cpu, cuda"),
        (None, ("gpu", (2, 2)), None, "device_type is 'gpu'"),
        (None, ((2, 2),), None, "device_type is (2, 2)"),
    ],
)
def test_init_device_mesh_refuses(monkeypatch, environment, arguments, names, said):
    monkeypatch.delenv("MESHLIB_MESH", raising=False)
    if environment is not None:
        monkeypatch.setenv("MESHLIB_MESH", environment)

    def rank():
        with pytest.raises(ValueError) as raised:
            init_device_mesh(*arguments, mesh_dim_names=names)
        return str(raised.value)

    for message in run_ranks(rank, 4):
        assert said in message


# ---------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ([], "mesh is empty"),
        ([[], []], "mesh is empty"),
        (3, "mesh 3 has no dim"),
        ([[0, 1], [2]], "ragged"),
        ([0, 1, 1], "rank 1 twice"),
        ([3, 3], "rank 3 twice"),
        ([7, 7, 7], "rank 7 twice"),
        ([0, -1], "rank -1; expected ranks >= 0"),
        ([0.0, 1.0], "dtype float64; expected integer ranks"),
        ([True, False], "dtype bool"),
        (["0", "1"], "expected integer ranks"),
        (None, "has no dim"),
        ([0, 2**70], "expected integer ranks"),
        (np.array([0, 2**63], np.uint64), "expected"),
    ],
)
def test_ranks_that_are_none_are_refused(mesh, said):
    with pytest.raises(ValueError) as raised:
        DeviceMesh("cpu", mesh)
    assert said in str(raised.value)


def test_ranks_beyond_the_world_are_refused():
    def rank():
        with pytest.raises(ValueError, match="mesh has rank 7, but the world size is 2"):
            DeviceMesh("cpu", [0, 7])
        with pytest.raises(ValueError, match="mesh has rank 11, but the world size is 2"):
            cube().get_group("dp")
        return True

    assert all(run_ranks(rank, 2))


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda m: m["dpp"], "'dpp' is not there; expected one of pp, dp, tp; did you mean"),
        (lambda m: m["dp", "dp"], "dim 'dp' would be there twice"),
        (lambda m: m[()], "no dim is named"),
        (lambda m: m[3], "dim 3 is not there"),
        (lambda m: m[True], "True names no dim"),
        (lambda m: m[1.0], "1.0 names no dim"),
        (lambda m: m[:2], "names no dim"),
        (lambda m: m[None], "None names no dim"),
        (lambda m: (m["pp", "dp"].flatten("f"), m["dp", "f"]), "'dp' and 'f' overlap"),
        (lambda m: m.permute("pp", "dp"), "expected each dim of pp=2 × dp=3 × tp=2 once"),
        (lambda m: m.permute("pp", "dp", "dp"), "expected each dim of pp=2"),
        (
            lambda _: DeviceMesh("cpu", [[[0]], [[1]]]).permute(0, 1, 1),
            "expected each dim of 2 × 1",
        ),
        (lambda _: DeviceMesh("cpu", [[0], [1]])[1, 1], "a dim would be there twice"),
        (lambda m: m.unflatten("dp", (2, 2), ("x", "y")), "needs 4 ranks, but the size of dim"),
        (lambda m: m.unflatten("dp", (2, -1), ("x", "y")), "does not divide 3, the size of dim"),
        (lambda m: m.unflatten("dp", (3, 1)), "mesh_dim_names is missing"),
        (lambda m: m.unflatten("dp", (3, 1), ("tp", "x")), "'tp' names other ranks"),
        (lambda m: (m.flatten("f"), m.unflatten("f", (12,), ("x",))), "'f' is a flattened name"),
        (lambda m: DeviceMesh.concatenate([]), "meshes is empty"),
        (lambda m: DeviceMesh.concatenate([m, m]), "would be there twice"),
        (lambda m: DeviceMesh.concatenate([m["dp"], m[2], m["dp"]]), "would be there twice"),
        (
            lambda m: DeviceMesh.concatenate([m, DeviceMesh("cpu", [0])]),
            "are not slices of one mesh",
        ),
        (lambda m: m.unflatten("dp", (3, 1), ("x", "x")), "'x' is there twice"),
        (
            lambda m: m.unflatten("tp", (2, 1), ("x", "y")).unflatten("dp", (3, 1), ("tp", "z")),
            "'tp' names other ranks of this mesh already",
        ),
        (lambda m: (m.flatten("f", timeout=3), m.flatten("f", timeout=4)), "take a new name"),
        (lambda m: m.flatten(""), "not a non-empty string"),
        (lambda m: m.flatten("f", timeout=-1), "flatten: timeout -1"),
        (lambda m: m.flatten("f", backend="tpc"), "backend 'tpc'"),
        (lambda m: m.get_local_rank(), "mesh_dim is missing; the mesh has 3 dims: pp=2 × dp=3"),
        (lambda m: m.get_group(), "mesh_dim is missing"),
        (lambda m: m.size("x"), "'x' is not there"),
        (lambda m: m.get_rank(), "call init_process_group"),
        (lambda m: m["dp"].mesh, "call init_process_group"),
        (lambda m: m.barrier(), "call init_process_group"),
    ],
)
def test_wrong_uses_are_refused(use, said):
    with pytest.raises(ValueError) as raised:
        use(cube())
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "timeout 0"),
        ({"timeout": True}, "timeout True"),
        ({"timeout": float("nan")}, "timeout nan"),
        ({"timeout": float("inf")}, "timeout inf"),
        ({"timeout": "soon"}, "timeout 'soon'"),
        ({"timeout": timedelta(seconds=-1)}, "expected a number of seconds > 0"),
        ({"backend": "nickel"}, "'nickel'"),
        ({"backend": 3}, "backend 3"),
        ({"backend_override": {"dq": "tcp"}}, "backend_override has 'dq'; expected"),
        ({"backend_override": {2: "tcp"}}, "backend_override has 2"),
        ({"timeout_override": {"dp": 0}}, "timeout_override: timeout 0"),
        ({"timeout_override": {"dp": 1, 0: 2}}, "names dim 0 (dp) twice"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ValueError) as raised:
        DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"), **options)
    assert said in str(raised.value)


def test_an_unknown_name_is_also_a_key_error_that_reads_well():
    with pytest.raises(KeyError) as raised:
        cube()["ep"]
    assert str(raised.value).startswith("dim 'ep' is not there; expected one of pp, dp, tp")
