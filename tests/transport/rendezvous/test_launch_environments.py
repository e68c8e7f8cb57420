"""Launchers, recognised by the variables that they set."""

from __future__ import annotations

import pytest

from transport.launch_environments import (
    DEFAULT_PORT,
    LaunchEnvironmentError,
    Place,
    derived_port,
    detect,
    first_host,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "gpu[03-05,9]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, Place("no launcher")),
        (TORCHRUN, Place("meshrun or torchrun", 3, 4, 1, 2, "node-1", 1234)),
        (SLURM, Place("Slurm", 5, 7, 1, 2, "gpu03", derived_port("slurm 4711 0"))),
        (
            OPEN_MPI,
            Place("Open MPI", 1, 2, 1, 2, "127.0.0.1", derived_port("openmpi prterun-host-77@1")),
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": ""},
            Place("Open MPI", 1, 4, 1, 2, None, DEFAULT_PORT),
        ),
        (PMI, Place("PMI", 0, 2, 0, 2, "127.0.0.1", DEFAULT_PORT)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Place("PMI", 0, 2, None, None, None, DEFAULT_PORT)),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "1"}, Place("no launcher", None, *[None] * 3, "h", 1)),
    ],
)
def test_what_launchers_say(variables: dict[str, str], place: Place) -> None:
    assert detect(variables) == place


def test_torchruns_variables_are_the_strongest() -> None:
    assert detect({**SLURM, **OPEN_MPI, **TORCHRUN}).rank == 3


def test_master_addr_and_port_are_stronger_than_what_is_implied() -> None:
    place = detect({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "9"})
    assert (place.rank, place.master_addr, place.master_port) == (5, "head", 9)


def test_a_batch_script_is_no_task() -> None:
    assert detect({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}).launcher == "no launcher"


@pytest.mark.parametrize("number", range(7))
def test_slurms_tasks_a_node(number: int) -> None:
    node = min(number // 2, 3)
    place = detect({**SLURM, "SLURM_PROCID": str(number), "SLURM_NODEID": str(node)})
    assert place.local_world_size == (1 if number == 6 else 2)


def test_a_number_that_is_none() -> None:
    with pytest.raises(LaunchEnvironmentError, match="PMI_SIZE must be a whole number, got 'two'"):
        detect({**PMI, "PMI_SIZE": "two"})


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
