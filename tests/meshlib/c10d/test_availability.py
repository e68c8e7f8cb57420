"""Queries about available backends and launchers."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import meshlib as dist
from meshlib._groups.backend import parse_backend
from tests.transport.rendezvous.test_launch_environments import SLURM
from transport._communicators import backends
from transport._errors import DistError


def test_backends():
    assert dist.is_available()
    assert dist.is_gloo_available()
    assert dist.is_backend_available("TCP")
    assert dist.is_backend_available("gloo")
    assert not dist.is_backend_available("smoke-signals")
    assert dist.is_mpi_available() == (importlib.util.find_spec("mpi4py") is not None)
    assert dist.is_nccl_available() == dist.is_backend_available("nccl")
    assert dist.get_default_backend_for_device("cpu:0") == "auto"
    with pytest.raises(ValueError, match="device 'tpu' is unknown; expected one of cpu, cuda"):
        dist.get_default_backend_for_device("tpu")


def test_backend_names():
    assert dist.Backend("TCP") == "tcp" == dist.Backend.TCP
    assert dist.Backend("cpu:TCP") == "cpu:tcp"
    with pytest.raises(ValueError, match=r"backend 'tpc' is unknown; expected one of .*tcp"):
        dist.Backend("tpc")
    with pytest.raises(ValueError, match="backend 'TCP' is already registered"):
        dist.Backend.register_backend("TCP", lambda membership: None)
    for name in (3, "", "a,b", "cpu:own"):
        with pytest.raises(ValueError, match=f"name must consist of letters.*got {name!r}"):
            dist.Backend.register_backend(name, lambda membership: None)
    with pytest.raises(TypeError, match=r"factory of backend 'own' must be callable .*got 3"):
        dist.Backend.register_backend("own", 3)
    with pytest.raises(ValueError, match=r"devices has \['tpu'\]; expected some of cpu, cuda"):
        dist.Backend.register_backend("own", lambda membership: None, devices=["cpu", "tpu"])
    assert not dist.is_backend_available("own")
    for call in (dist.Backend, dist.is_backend_available, dist.init_process_group):
        with pytest.raises(ValueError, match="backend must be a string such as 'tcp', got 3"):
            call(3)
    with pytest.raises(ValueError, match="names device 'tpu'"):
        dist.init_process_group("tpu:tcp")
    with pytest.raises(ValueError, match="names a backend for 'cpu' twice"):
        dist.init_process_group("cpu:tcp,cpu:inproc")


@pytest.mark.parametrize(
    ("variables", "local_rank"),
    [
        ({"LOCAL_RANK": "3"}, 3),
        (SLURM | {"SLURM_LOCALID": "3"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"PMI_RANK": "5", "MPI_LOCALRANKID": "4"}, 4),
    ],
)
def test_local_rank(variables, local_rank, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank(fallback_rank=7) == 7
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not set; expected it, or fallback_rank"):
        dist.get_node_local_rank()
    with pytest.raises(TypeError, match="fallback_rank must be a whole number, got '7'"):
        dist.get_node_local_rank("7")
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(DistError, match="LOCAL_RANK must be a whole number, got 'first'"):
        dist.get_node_local_rank()
    monkeypatch.delenv("LOCAL_RANK")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dist.get_node_local_rank() == local_rank


def test_launched_by_meshrun(monkeypatch):
    monkeypatch.delenv("MESHLIB_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("MESHLIB_RUN_ID", "1")
    assert dist.is_torchelastic_launched()


def test_supports_complex():
    some = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"}
    good = {op for op in some if dist.supports_complex(getattr(dist.ReduceOp, op))}
    assert good == {"SUM", "AVG", "PRODUCT"}
    assert dist.supports_complex(dist.premul_sum(2))


def test_the_old_name_of_reduce_op_warns():
    with pytest.warns(FutureWarning, match="use ReduceOp"):
        assert dist.reduce_op.SUM is dist.ReduceOp.SUM
    with pytest.raises(AttributeError, match="reduce_op has no BAND"):
        dist.reduce_op.BAND  # noqa: B018


def test_init_refuses_what_does_not_fit():
    store = dist.HashStore()
    for arguments, match in [
        ({"init_method": "carrier-pigeon://x"}, "scheme 'carrier-pigeon' .* is unknown"),
        ({"store": store}, "an explicit store needs rank and world_size"),
        ({"store": store, "rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"store": store, "init_method": "env://", "rank": 0, "world_size": 1}, "both given"),
        ({"init_method": "tcp://localhost:1", "rank": 0}, "world_size is missing"),
        ({"backend": "tpc"}, "backend 'tpc' is unknown"),
        ({"timeout": -1}, "timeout must be"),
    ]:
        with pytest.raises(ValueError, match=match):
            dist.init_process_group(**{"backend": "tcp", **arguments})
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="call init_process_group"):
        dist.get_rank()


def test_a_scheme_of_ones_own():
    def handler(url, timeout, group_name, **_):
        yield dist.HashStore(), 0, 1

    dist.register_rendezvous_handler("lonely", handler)
    with pytest.raises(ValueError, match="scheme 'lonely' is already registered"):
        dist.register_rendezvous_handler("lonely", handler)
    for _ in range(2):
        dist.init_process_group("gloo", init_method="lonely://")
        assert dist.is_initialized()
        assert dist.get_backend() == "auto"
        assert dist.all_reduce(np.ones(1))[0] == 1
        with pytest.raises(ValueError, match="already initialised"):
            dist.init_process_group("gloo", init_method="lonely://")
        dist.destroy_process_group()
    _, rank, size = next(dist.rendezvous("lonely://"))
    assert (rank, size) == (0, 1)


def test_an_installed_package_serves_the_devices_that_its_entry_points_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "theirs-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[meshlib.backends]\nTheirs = theirs:make\ntorn = theirs:one\n"
        "[meshlib.backends.cuda]\ntheirs = theirs:make\ntorn = theirs:other\n"
        "theirs-gpu = theirs:make_gpu\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert backends.lookup("theirs").devices == ("cpu", "cuda")
    assert backends.lookup("theirs-GPU").devices == ("cuda",)
    assert parse_backend("theirs-gpu") == {"cpu": "auto", "cuda": "theirs-gpu"}
    assert parse_backend("theirs") == {"cpu": "theirs", "cuda": "theirs"}
    with pytest.raises(ValueError, match="installed as theirs:one and as theirs:other"):
        backends.lookup("torn")
