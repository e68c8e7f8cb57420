"""DeviceMesh: its groups on ranks as threads, and what it refuses."""

from __future__ import annotations

import pickle
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world, install, world_of
from meshlib._job.world import World
from meshlib._mesh.device_mesh import DeviceMesh, current_mesh
from meshlib._mesh.init import init_device_mesh
from meshlib.testing import run_ranks
from tests.support.meshlib.cube import cube
from transport._communicators.runtime import Runtime
from transport._store.hash_store import HashStore

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
        for call in (
            lambda: mesh.get_group("dp"),
            mesh.get_all_groups,
            lambda: mesh.get_local_rank("dp"),
            lambda: part.mesh,
        ):
            with pytest.raises(ValueError, match="rank 2 is not in"):
                call()
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
        assert world_of(group) is current_world()
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
        for groups, ranks, message in (
            ([row, column], [[0, 1], [2, 3]], "group 0 has the ranks"),
            ([row, column], None, "mesh is missing"),
            ([row], [[0, 1], [2, 3]], "mesh has 2 dims; expected one for each group, that is 1"),
            (row, [3, 2, 1, 0], "group 0 has the ranks"),
            (row, [[0, 1]], "mesh has 2 dims"),
            ([], [0], "expected one for each group, that is 0"),
        ):
            with pytest.raises(ValueError, match=message):
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
    world = World(
        HashStore(), 0, 1, runtime=Runtime(), backends={"cpu": "inproc"}, timeout=10.0
    ).join()
    install(world, thread_only=True)
    try:
        with DeviceMesh("cpu", [0]):
            dist.destroy_process_group()
        assert not dist.is_initialized()
    finally:
        install(None, thread_only=True)


# ---------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("mesh", "message"),
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
def test_ranks_that_are_none_are_refused(mesh, message):
    with pytest.raises(ValueError) as raised:
        DeviceMesh("cpu", mesh)
    assert message in str(raised.value)


def test_ranks_beyond_the_world_are_refused():
    def rank():
        with pytest.raises(ValueError, match="mesh has rank 7, but the world size is 2"):
            DeviceMesh("cpu", [0, 7])
        with pytest.raises(ValueError, match="mesh has rank 11, but the world size is 2"):
            cube().get_group("dp")
        return True

    assert all(run_ranks(rank, 2))


@pytest.mark.parametrize(
    ("use", "message"),
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
def test_wrong_uses_are_refused(use, message):
    with pytest.raises(ValueError) as raised:
        use(cube())
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError) as raised:
        DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"), **options)
    assert message in str(raised.value)


def test_an_unknown_name_is_also_a_key_error_that_reads_well():
    with pytest.raises(KeyError) as raised:
        cube()["ep"]
    assert str(raised.value).startswith("dim 'ep' is not there; expected one of pp, dp, tp")
