"""Engines, recognised by the variables that they set: measured ones, as ranks and agents find them.

Slurm 22.05 (Debian 12) of two nodes, Open MPI 4.1.4 and MPICH 4.0.2 in it; variables that no answer
depends on are left out.
"""

from __future__ import annotations

import pytest

from transport._launch_environments import (
    DEFAULT_PORT,
    LaunchEnvironmentError,
    NodePlace,
    RankPlace,
    derived_port,
    detect,
    detect_nodes,
    engine_restarts,
    first_host,
    hints,
)
from transport._launch_environments.kubernetes import subdomain

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "1234",
}
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[03-05,9]",
    "SLURM_JOB_NUM_NODES": "4",
}
# srun -N4 -n7 python, on the third node
SLURM = {
    **JOB,
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
# srun -N2 --ntasks-per-node=1 meshrun, on the second node
SLURM_NODE = {
    **JOB,
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[04-05]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# sbatch -N2 -n4: the script itself
SLURM_BATCH = {
    **JOB,
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}
# salloc, where the site makes its shell a step (LaunchParameters=use_interactive_step)
SLURM_SHELL = {
    **SLURM,
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
# salloc -N2 -n4 mpirun -n 4: rank 2. Its daemon is task 0 of a step of two, and hands that on.
OPEN_MPI_IN_SLURM = {
    **SLURM_NODE,
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "1589837825",
    "PMIX_RANK": "2",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
# sbatch -N2 -n4, mpirun.mpich -n 4: rank 3, alone on its node
HYDRA_IN_SLURM = {
    **SLURM_NODE,
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
}
# srun -N2 -n2 --mpi=pmi2
SLURMS_PMI = {**SLURM_NODE, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "4711.3"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, RankPlace("no launcher")),
        (TORCHRUN, RankPlace("meshrun or torchrun", 3, 4, 1, 2, "node-1", 1234)),
        (SLURM, RankPlace("Slurm", 5, 7, 1, 2, "gpu03", derived_port("slurm 4711 0"))),
        (
            {**SLURM_NODE, "SLURM_RESTART_COUNT": "2"},
            RankPlace("Slurm", 1, 2, 0, 1, "gpu04", derived_port("slurm 4711 3 restart 2")),
        ),
        (
            OPEN_MPI,
            RankPlace(
                "Open MPI", 1, 2, 1, 2, "127.0.0.1", derived_port("openmpi prterun-host-77@1")
            ),
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": ""},
            RankPlace("Open MPI", 1, 4, 1, 2, None, DEFAULT_PORT),
        ),
        (
            OPEN_MPI_IN_SLURM,
            RankPlace("Open MPI", 2, 4, 2, 3, "gpu03", derived_port("openmpi 1589837825")),
        ),
        (PMI, RankPlace("PMI", 0, 2, 0, 2, "127.0.0.1", DEFAULT_PORT)),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            RankPlace("PMI", 0, 2, None, None, None, DEFAULT_PORT),
        ),
        (HYDRA_IN_SLURM, RankPlace("PMI", 3, 4, 0, 1, "gpu03", derived_port("pmi 4711 3"))),
        (SLURMS_PMI, RankPlace("Slurm", 1, 2, 0, 1, "gpu04", derived_port("slurm 4711 3"))),
        (
            {"MASTER_ADDR": "h", "MASTER_PORT": "1"},
            RankPlace("no launcher", None, *[None] * 3, "h", 1),
        ),
    ],
)
def test_the_place_that_a_launcher_assigns(variables: dict[str, str], place: RankPlace) -> None:
    assert detect(variables) == place


def test_torchruns_variables_are_the_strongest() -> None:
    assert detect({**SLURM, **OPEN_MPI, **TORCHRUN}).rank == 3


def test_master_addr_and_port_are_stronger_than_what_is_implied() -> None:
    place = detect({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "9"})
    assert (place.rank, place.master_addr, place.master_port) == (5, "head", 9)


@pytest.mark.parametrize(
    "variables", [SLURM_BATCH, SLURM_SHELL, JOB, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}]
)
def test_what_is_no_task_of_a_step_is_no_rank(variables: dict[str, str]) -> None:
    """A batch script waited for ranks 1 to 3."""
    assert detect(variables).launcher == "no launcher"
    assert "Expected srun python" in hints(variables)


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"]
)
def test_half_of_a_tasks_variables(name: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=f"SLURM_STEP_ID=0 but not {name}"):
        detect({**SLURM, name: ""})


@pytest.mark.parametrize("number", range(7))
def test_slurms_tasks_a_node(number: int) -> None:
    node = min(number // 2, 3)
    place = detect({**SLURM, "SLURM_PROCID": str(number), "SLURM_NODEID": str(node)})
    assert place.local_world_size == (1 if number == 6 else 2)


def test_a_step_on_one_node_meets_on_loopback() -> None:
    one = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3"}
    assert detect({**SLURM, **one}).master_addr == "127.0.0.1"


def test_a_number_that_is_none() -> None:
    with pytest.raises(LaunchEnvironmentError, match="PMI_SIZE must be a whole number, got 'two'"):
        detect({**PMI, "PMI_SIZE": "two"})


class TestOverride:
    def test_meshlib_launcher_names_the_only_engine_to_read(self) -> None:
        assert detect({**OPEN_MPI_IN_SLURM, "MESHLIB_LAUNCHER": "slurm"}).launcher == "Slurm"
        assert detect({**SLURMS_PMI, "MESHLIB_LAUNCHER": "Slurm"}).rank == 1
        (node,) = detect_nodes({**SLURM_NODE, "MESHLIB_LAUNCHER": "slurm"})
        assert node.node == 1

    def test_none_is_a_world_of_one(self) -> None:
        place = detect({**SLURM, **TORCHRUN, "MESHLIB_LAUNCHER": "none"})
        assert (place.rank, place.world_size) == (0, 1)
        assert list(detect_nodes({**SLURM, "MESHLIB_LAUNCHER": "none"})) == []

    def test_an_engine_that_is_not_there(self) -> None:
        for find in (detect, lambda variables: list(detect_nodes(variables))):
            with pytest.raises(LaunchEnvironmentError, match="openmpi, but Open MPI has not"):
                find({**SLURM, "MESHLIB_LAUNCHER": "openmpi"})

    def test_an_unknown_engine(self) -> None:
        with pytest.raises(LaunchEnvironmentError, match=r"one of none, .*slurm; got 'slrm'"):
            detect({"MESHLIB_LAUNCHER": "slrm"})


# https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html (0.10)
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2025-07-01-10-00-00_cluster_id-1",
}
# https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables (v0.7)
LWS = {
    "LWS_LEADER_ADDRESS": "train-0.train.default",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "3",
}
# Kubeflow Trainer 2.0, the torch policy: pkg/runtime/framework/plugins/torch/torch.go
TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-node-0-1",
}
# Kubeflow Training Operator 1.8, elastic: pkg/controller.v1/pytorch/elastic.go
ELASTIC = {
    "PET_NNODES": "1:3",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "train-worker-0:23456",
    "PET_RDZV_ID": "train",
    "PET_MAX_RESTARTS": "3",
}
# Kubernetes 1.30, Indexed Job: docs/concepts/workloads/controllers/job/#completion-mode
INDEXED = {
    "JOB_COMPLETION_INDEX": "2",
    "HOSTNAME": "train-2",
    "MASTER_ADDR": "train-0.train",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (
            SLURM_NODE,
            NodePlace(
                *("Slurm", "2", 1, None, "gpu04", derived_port("slurm 4711 3"), "slurm-4711.3")
            ),
        ),
        (
            SKYPILOT,
            NodePlace(
                *("SkyPilot", "2", 1, "8", "10.0.0.4"),
                derived_port(f"skypilot {SKYPILOT['SKYPILOT_TASK_ID']}"),
                SKYPILOT["SKYPILOT_TASK_ID"],
            ),
        ),
        (
            LWS,
            NodePlace(
                *("LeaderWorkerSet", "4", 3, None, "train-0.train.default", None),
                "train-0.train.default",
            ),
        ),
        (
            TRAINER,
            NodePlace("PET_ variables", "2", 1, "auto", "train-node-0-0.train", 29400, None),
        ),
        (
            ELASTIC,
            NodePlace("PET_ variables", "1:3", None, None, "train-worker-0", 23456, "train"),
        ),
        (INDEXED, NodePlace("Kubernetes", None, 2, None, "train-0.train", None, "train")),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "7"},
            NodePlace(
                *("Open MPI", "2", 1, None, None, derived_port("openmpi 7")),
                f"openmpi-{derived_port('openmpi 7')}",
            ),
        ),
    ],
)
def test_the_place_of_a_nodes_agent(variables: dict[str, str], place: NodePlace) -> None:
    assert next(detect_nodes(variables)) == place


@pytest.mark.parametrize("variables", [{}, TORCHRUN, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_who_is_no_nodes_agent(variables: dict[str, str]) -> None:
    assert list(detect_nodes(variables)) == []


def test_a_launcher_inside_a_rank_reads_no_engine() -> None:
    assert list(detect_nodes({**SLURM, "MESHLIB_RUN_ID": "a launch around"})) == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (SLURM, "srun has started 7 tasks on 4 nodes"),
        (SLURM_BATCH, "has 4 nodes, and meshrun was not started by srun on each"),
        (SLURM_SHELL, "has 4 nodes, and meshrun was not started by srun on each"),
        (OPEN_MPI, "Open MPI has started 2 processes on this node"),
        (PMI, "PMI has started 2 processes on this node"),
        ({**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.4"}, "has 1 addresses"),
    ],
)
def test_what_would_make_wrong_worlds(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=message):
        list(detect_nodes(variables))


def test_how_often_engines_have_started_the_job_again() -> None:
    assert engine_restarts({}) == 0
    assert engine_restarts({"SLURM_RESTART_COUNT": "2"}) == 2
    assert engine_restarts({"MESHLIB_ENGINE_RESTARTS": "1"}) == 1


def test_a_pods_subdomain() -> None:
    hosts = "127.0.0.1 localhost\n10.1.0.9\ttrain-2.workers.default.svc.cluster.local\ttrain-2\n"
    assert subdomain("train-2", hosts) == "workers"
    assert subdomain("train-2", "10.1.0.9 train-2\n") == ""
    assert subdomain("other", hosts) == ""


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("rack1-n[2,4]-ib,other[1-2]", "rack1-n2-ib"),
    ],
)
def test_first_hosts(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_derived_ports_are_equal_and_unprivileged() -> None:
    assert derived_port("a job") == derived_port("a job")
    assert all(1024 < derived_port(str(job)) < 32768 for job in range(1000))
