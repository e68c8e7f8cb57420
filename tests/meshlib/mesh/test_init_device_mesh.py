"""``init_device_mesh``: the job's own mesh, the launcher's, and what it refuses."""

from __future__ import annotations

import pytest

import meshlib as dist
from meshlib._job.current import install
from meshlib._job.world import World
from meshlib._launcher.options.arguments import parse
from meshlib._mesh.device_mesh import DeviceMesh
from meshlib._mesh.init import init_device_mesh
from meshlib._mesh.spec import MeshDimError
from meshlib.testing import run_ranks
from transport._communicators.runtime import Runtime
from transport._store.hash_store import HashStore

# ---------------------------------------------------------------------- init_device_mesh


def test_the_job_is_joined_if_that_was_not_done(monkeypatch):
    joined = []

    def join():
        joined.append(
            World(
                HashStore(), 0, 1, runtime=Runtime(), backends={"cpu": "inproc"}, timeout=10.0
            ).join()
        )
        install(joined[0], thread_only=True)

    monkeypatch.setattr("meshlib._job.starting.init.init_process_group", join)
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


def test_a_file_that_the_launcher_has_read_is_read_no_more(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "m.TOML").write_text('[mesh]\ndp = 2\ntp = -1\ntimeout = "7s"\n')
    handed = parse(["--mesh", "m.TOML", "--nproc-per-node", "4", "train.py"]).mesh
    (tmp_path / "m.TOML").unlink()
    monkeypatch.setenv("MESHLIB_MESH", handed)

    def rank():
        mesh = init_device_mesh()
        return mesh.shape, mesh["tp"].process_group.timeout.total_seconds()

    assert run_ranks(rank, 4) == [((2, 2), 7.0)] * 4


@pytest.mark.parametrize(
    ("environment", "arguments", "names", "expected"),
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
        (None, ("cpu", 4), None, "mesh_shape 4 is not a sequence"),
        (None, ("cpu", (2, 2)), ("dp",), "has 1 names, expected one for each of 2 dims"),
        (None, ("cpu", (2, 2)), ("dp", "dp"), "'dp' is there twice"),
        (None, ("cpu", (2, 2)), ("dp", ""), "'' is not a non-empty string"),
        (None, ("cpu", (2, 2)), "ab", "mesh_dim_names 'ab' is a string"),
        (None, ("cuda:0", (2, 2)), None, "device_type is 'cuda:0'; expected one of cpu, cuda"),
        (
            None,
            ("gpu", (2, 2)),
            None,
            "'gpu'; expected one of cpu, cuda; did you mean 'cuda'",
        ),
        (None, ((2, 2),), None, "device_type is (2, 2)"),
    ],
)
def test_init_device_mesh_refuses(monkeypatch, environment, arguments, names, expected):
    monkeypatch.delenv("MESHLIB_MESH", raising=False)
    if environment is not None:
        monkeypatch.setenv("MESHLIB_MESH", environment)

    def rank():
        with pytest.raises(ValueError) as raised:
            init_device_mesh(*arguments, mesh_dim_names=names)
        return str(raised.value)

    for message in run_ranks(rank, 4):
        assert expected in message
