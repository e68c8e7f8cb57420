"""The options that meshrun takes from the engine if its command line does not set them."""

from __future__ import annotations

import pytest

from meshlib._launcher.options.arguments import parse
from tests.transport.rendezvous.test_launch_environments import (
    ELASTIC,
    HYDRA_IN_SLURM,
    INDEXED,
    LWS,
    OPEN_MPI,
    SKYPILOT,
    SLURM,
    SLURM_BATCH,
    SLURM_NODE,
    TRAINER,
)
from transport._launch_environments import derived_port

SECRET = "ab" * 32


@pytest.fixture
def options_of(tmp_path, monkeypatch):
    """Parse a command line in an environment of an engine's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHLIB_SECRET", SECRET)
    (tmp_path / "train.py").touch()

    def parse_in(variables, *flags):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return parse([*flags, "train.py"])

    return parse_in


def test_slurms_nodes(options_of):
    options = options_of(SLURM_NODE, "--nproc-per-node", "2")
    nodes = options.nodes
    assert (nodes.least, nodes.most, nodes.rank, nodes.host) == (2, 2, 1, "gpu04")
    assert (nodes.port, nodes.job) == (derived_port("slurm 4711 3"), "slurm-4711.3")
    assert options.ranks == 2
    assert options.notes[0].startswith("options from Slurm: --nnodes 2 --rdzv-id slurm-4711.3")


def test_a_restart_is_part_of_the_jobs_name(options_of):
    assert options_of({**SLURM_NODE, "SLURM_RESTART_COUNT": "2"}).nodes.job == "slurm-4711.3~2"


def test_and_of_one_that_the_user_gave(options_of):
    nodes = options_of({**SLURM_NODE, "SLURM_RESTART_COUNT": "1"}, "--rdzv-id", "train").nodes
    assert nodes.job == "train~1"


@pytest.mark.parametrize(
    "flags", [["--standalone"], ["--nnodes", "1"]], ids=["standalone", "one node"]
)
@pytest.mark.parametrize("variables", [SLURM, SLURM_BATCH, SLURM_NODE], ids=["step", "batch", "n"])
def test_who_asks_nobody(options_of, variables, flags):
    assert not options_of(variables, *flags).nodes.many


def test_an_address_that_is_given_needs_no_engine(options_of):
    """SLURM has several tasks a node, which would be an error."""
    flags = ["--nnodes=2", "--node-rank=1", "--master-addr=other", "--rdzv-id=mine"]
    nodes = options_of(SLURM, *flags).nodes
    assert (nodes.most, nodes.rank, nodes.host, nodes.job) == (2, 1, "other", "mine")


def test_number_and_address_come_from_one_source(options_of):
    """Node 0 is at the address: another one's number says nothing there."""
    nodes = options_of(SLURM_NODE, "--rdzv-endpoint", "other:1").nodes
    assert (nodes.most, nodes.rank, nodes.host, nodes.port) == (2, None, "other", 1)


def test_elastic_nodes_are_numbered_as_they_come(options_of):
    nodes = options_of(SLURM_NODE, "--nnodes", "1:2").nodes
    assert (nodes.least, nodes.most, nodes.rank, nodes.host) == (1, 2, None, "gpu04")


def test_kubeflow_trainer(options_of, monkeypatch):
    monkeypatch.setattr("meshlib._launcher.options.arguments.count_gpus", lambda: 3)
    options = options_of(TRAINER)
    nodes = options.nodes
    assert (nodes.most, nodes.rank, nodes.host) == (2, 1, "train-node-0-0.train")
    assert (nodes.port, options.ranks) == (29400, 3)


def test_kubeflows_elastic_jobs(options_of):
    options = options_of(ELASTIC)
    nodes = options.nodes
    assert (nodes.least, nodes.most, nodes.rank, nodes.job) == (1, 3, None, "train")
    assert (nodes.host, nodes.port, options.max_restarts) == ("train-worker-0", 23456, 3)


def test_torchruns_variables_are_asked_before_the_engine(options_of):
    assert options_of({**SLURM_NODE, **TRAINER, "PET_NPROC_PER_NODE": "1"}).nodes.host.startswith(
        "train"
    )


def test_the_engine_says_what_they_do_not(options_of):
    nodes = options_of({**SLURM_NODE, "PET_NPROC_PER_NODE": "4"})
    assert (nodes.ranks, nodes.nodes.host) == (4, "gpu04")


def test_skypilot(options_of):
    options = options_of(SKYPILOT)
    assert (options.ranks, options.nodes.host, options.nodes.rank) == (8, "10.0.0.4", 1)


def test_leader_worker_set(options_of):
    nodes = options_of(LWS).nodes
    assert (nodes.most, nodes.rank, nodes.host, nodes.port) == (
        4,
        3,
        LWS["LWS_LEADER_ADDRESS"],
        29500,
    )


def test_an_indexed_job(options_of):
    nodes = options_of({**INDEXED, "MESHLIB_ENGINE_RESTARTS": "1"}, "--nnodes", "3").nodes
    assert (nodes.most, nodes.rank, nodes.host, nodes.job) == (3, 2, "train-0.train", "train~1")


@pytest.mark.parametrize(
    ("variables", "flags", "words"),
    [
        (SLURM, [], ["srun has started 7 tasks on 4 nodes", "--ntasks-per-node=1"]),
        (SLURM_BATCH, [], ["job 4711 has 4 nodes", "--standalone"]),
        (INDEXED, [], ["this is node 2, but not of how many", "--nnodes N"]),
        (
            {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "nowhere"},
            ["--nnodes", "2"],
            ["Kubernetes announces 2 nodes, but not their rendezvous", "--master-addr"],
        ),
        (
            HYDRA_IN_SLURM | {"SLURM_JOB_NODELIST": ""},
            [],
            ["PMI announces 4 nodes", "not their rendezvous"],
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            [],
            ["Open MPI announces 2 nodes, but not their rendezvous"],
        ),
        ({"MESHLIB_LAUNCHER": "lws"}, [], ["MESHLIB_LAUNCHER is lws"]),
    ],
)
def test_several_nodes_and_no_way_to_meet(options_of, capsys, variables, flags, words):
    """Each of them would have been a job by itself."""
    with pytest.raises(SystemExit) as caught:
        options_of(variables, *flags)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert all(word in printed for word in words), printed


def test_nodes_without_a_secret(options_of, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        options_of({**SLURM_NODE, "MESHLIB_SECRET": ""})
    assert "Run `meshlib secret` once" in capsys.readouterr().err


def test_signals_that_slurm_sends_to_ranks_too(options_of):
    options = options_of(SLURM_NODE)
    assert options.engine_signals
    assert options.signal_grace == 25.0  # below KillWait's 30


@pytest.mark.parametrize("variables", [{}, SLURM_BATCH])
def test_signals_that_nobody_else_sends(options_of, variables):
    options = options_of(variables, "--standalone")
    assert not options.engine_signals
    assert options.signal_grace == 30.0


def test_what_torchx_gives(options_of):
    """Its dist.ddp has an empty role, and asks for output that is shown anyway."""
    options = options_of({}, "--role", "", "--tee", "3", "--rdzv_backend", "c10d")
    assert options.output.tee == {}
