"""``env://``: the environment says where and who."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.transport.rendezvous_ranks import (
    SOON,
    check_together,
    meet,
    meeting,
    run_processes,
)
from transport._launch_environments import LaunchEnvironmentError
from transport._store import PrefixStore, TCPStore, TCPStoreServer

NAMES = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MESHLIB_SECRET"),
    *("MESHLIB_AGENT_STORE", "MESHLIB_RESTART_COUNT", "PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    *("SLURM_PROCID", "SLURM_STEP_ID", "MESHLIB_LAUNCHER"),
)


@pytest.fixture(autouse=True)
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Start from an environment that says nothing."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def agent(env: pytest.MonkeyPatch) -> Iterator[TCPStoreServer]:
    """The environment of ranks whose launcher serves the store."""
    server = TCPStoreServer("127.0.0.1", secret=b"s")
    env.setenv("MESHLIB_AGENT_STORE", f"127.0.0.1:{server.port}")
    env.setenv("MESHLIB_SECRET", b"s".hex())
    env.setenv("MASTER_ADDR", "127.0.0.1")
    env.setenv("MASTER_PORT", str(server.port))
    yield server
    server.close()


def test_all_from_the_environment(env: pytest.MonkeyPatch, free_port: int) -> None:
    env.setenv("RANK", "0")
    env.setenv("WORLD_SIZE", "1")
    env.setenv("MASTER_ADDR", "localhost")
    env.setenv("MASTER_PORT", str(free_port))
    store, rank, world_size = meet("env://")
    assert (rank, world_size) == (0, 1)
    store.close()


def test_arguments_are_stronger(env: pytest.MonkeyPatch, free_port: int) -> None:
    env.setenv("RANK", "7")
    env.setenv("WORLD_SIZE", "9")
    env.setenv("MASTER_ADDR", "127.0.0.1")
    env.setenv("MASTER_PORT", str(free_port))
    with meeting("env://", range(3)) as met:
        check_together(met, range(3))


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(env: pytest.MonkeyPatch, missing: str) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in given.items():
        if name != missing:
            env.setenv(name, value)
    with pytest.raises(LaunchEnvironmentError) as caught:
        meet("env://")
    text = str(caught.value)
    assert f"needs {missing} in the environment" in text
    for name, value in given.items():
        assert (f"{name}={value!r}" in text) == (name != missing)


def test_nothing_at_all(env: pytest.MonkeyPatch) -> None:
    env.setattr("sys.argv", ["/home/me/train.py", "--lr", "1"])
    with pytest.raises(LaunchEnvironmentError) as caught:
        meet("env://")
    text = str(caught.value)
    assert "needs RANK and WORLD_SIZE and MASTER_ADDR and MASTER_PORT" in text
    assert "found none of its variables and no launcher" in text
    assert "recognised: meshrun or torchrun, Open MPI, PMI" in text
    assert "meshrun --nproc-per-node 2 train.py" in text
    assert "MESHLIB_LAUNCHER=none" in text
    assert "init_method='solo://'" in text


class TestAlone:
    @pytest.mark.parametrize("way", ["solo://", "env://"])
    def test_a_world_of_one_is_logged(
        self, env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
    ) -> None:
        if way == "env://":
            env.setenv("MESHLIB_LAUNCHER", "none")
            env.setenv("RANK", "3")  # of a launcher that is not asked
            env.setenv("WORLD_SIZE", "4")
        store, rank, world_size = meet(way)
        assert (rank, world_size) == (0, 1)
        store.close()
        (record,) = caplog.records
        cause = "MESHLIB_LAUNCHER=none" if way == "env://" else "'solo://'"
        assert record.getMessage() == (
            f"a world of one, requested by {cause}: no other process takes part"
        )

    @pytest.mark.parametrize("place", [(1, 1), (0, 2)])
    def test_another_place_than_that_is_refused(self, place: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="makes a world of one; expected"):
            meet("solo://", *place)


class TestImpliedAddress:
    """Where Slurm puts rank 0, as the ranks compute it."""

    @pytest.fixture(autouse=True)
    def step(self, env: pytest.MonkeyPatch, tmp_path: Path) -> None:
        env.setenv("XDG_CONFIG_HOME", str(tmp_path))
        for name, value in {
            **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "192.0.2.[1-2]"},
            **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            **{"SLURM_PROCID": "1", "SLURM_NODEID": "1"},
        }.items():
            env.setenv(name, value)

    def test_a_secret_is_needed_and_the_command_is_named(self) -> None:
        with pytest.raises(LaunchEnvironmentError, match=r"connect to 192.0.2.1.*`meshlib secret`"):
            meet("env://")

    def test_rank_0_has_to_be_there(self, env: pytest.MonkeyPatch) -> None:
        env.setenv("MESHLIB_SECRET", "ab" * 32)
        env.setenv("SLURM_PROCID", "0")
        with pytest.raises(
            LaunchEnvironmentError,
            match=r"lists 192.0.2.1 as its first node, but started rank 0 on",
        ):
            meet("env://")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "4", "RANK must be from 0 to WORLD_SIZE - 1 = 3, got 4"),
        ("RANK", "-1", "RANK must be from 0 to"),
        ("WORLD_SIZE", "0", "WORLD_SIZE must be at least 1, got 0"),
        ("RANK", "first", "RANK must be a whole number, got 'first'"),
        ("MASTER_PORT", "http", "MASTER_PORT must be a whole number, got 'http'"),
        ("MASTER_PORT", "0", "MASTER_PORT must be a port from 1 to 65535, got 0"),
        ("MESHLIB_SECRET", "xyz", "MESHLIB_SECRET must be hexadecimal"),
    ],
)
def test_wrong_values(env: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, text in {**given, name: value}.items():
        env.setenv(variable, text)
    with pytest.raises(ValueError, match=message):
        meet("env://", timeout=1)


class TestAgentsStore:
    def test_every_rank_is_a_client(self, agent: TCPStoreServer) -> None:
        with meeting("env://", range(3)) as met:
            check_together(met, range(3))
        with TCPStore(*agent.address, timeout=SOON) as store:
            assert store.num_keys() > 0

    def test_restarts_are_apart(self, agent: TCPStoreServer, env: pytest.MonkeyPatch) -> None:
        with meeting("env://", range(2)) as met:
            met[0][0].set("mark", "")
        env.setenv("MESHLIB_RESTART_COUNT", "1")
        with meeting("env://", range(2)) as met:
            assert not met[0][0].check(["mark"])
            check_together(met, range(2))
        with TCPStore(*agent.address, timeout=SOON) as store:
            prefixed = PrefixStore("turn1", PrefixStore("restart0", store))
            assert prefixed.check(["mark"])

    def test_initialising_again(self, agent: TCPStoreServer) -> None:
        """Each rank's second time meets the others' second, also before the first has ended."""
        with ThreadPoolExecutor(1) as pool, meeting("env://", range(2)) as first:
            first[0][0].set("mark", "first")
            first[1][0].close()
            store, _, _ = meet("env://", 1, 2)
            late = pool.submit(store.get, "mark")
            second, _, _ = meet("env://", 0, 2)
            second.set("mark", "second")
            assert late.result(SOON) == b"second"
            store.close()
            second.close()

    @pytest.mark.processes
    def test_processes(self, agent: TCPStoreServer) -> None:
        places = [(f"env://?rank={rank}", -1, 3) for rank in range(3)]
        assert run_processes(places) == ["0 3", "1 3", "2 3"]

    def test_a_program_with_an_address_of_its_own(
        self, agent: TCPStoreServer, env: pytest.MonkeyPatch, free_port: int
    ) -> None:
        """Its rank 0 serves there, as without a launcher."""
        env.setenv("MASTER_PORT", str(free_port))
        with meeting("env://", range(2)) as met:
            check_together(met, range(2))
        with TCPStore(*agent.address, timeout=SOON) as store:
            assert store.num_keys() == 0
