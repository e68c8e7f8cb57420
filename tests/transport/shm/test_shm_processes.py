"""Shared memory between real processes: values, deaths, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.transport.shm.shm_worker import MIB, VICTIM
from transport._store.tcp.store import TCPStore

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
SECONDS = 60.0


@pytest.fixture
def store() -> Iterator[TCPStore]:

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store
    store.close()
    assert not [name for name in os.listdir("/dev/shm") if "meshlib" in name]


def start(store: TCPStore, scenario: str, size: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "shm_worker.py"),
                *map(str, (rank, size, store.port)),
                scenario,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def run(store: TCPStore, scenario: str, size: int = 3) -> list[dict[str, Any] | None]:
    """Return what each rank printed; None for one that was killed."""
    workers = start(store, scenario, size)
    try:
        outputs = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for rank, worker in enumerate(workers):
        killed = rank == VICTIM and worker.returncode == -signal.SIGKILL
        assert killed or worker.returncode == 0, f"rank {rank} ended with {worker.returncode}"
    results = [json.loads(output) if output else None for output in outputs]
    for result in results:
        assert result is None or result["left"] == {}
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_processes_get_the_right_values_and_leave_nothing(store: TCPStore, size: int) -> None:
    assert all(result is not None for result in run(store, "values", size))


@pytest.mark.parametrize(
    "scenario",
    [
        "killed_while_waited_for",
        "killed_before_its_first_call",
        "killed_while_it_computes_a_large_reduction",
        "killed_while_it_sends",
        "killed_while_sent_to",
    ],
)
def test_a_killed_rank_is_missed_by_all_and_nothing_of_it_remains(
    store: TCPStore, scenario: str
) -> None:
    results = run(store, scenario)
    assert results[VICTIM] is None
    survivors = [result for result in results if result is not None]
    assert len(survivors) == len(results) - 1
    # The first to notice leaves, and may be missed by the other before the victim is.
    lost = [result["lost"] for result in survivors]
    assert VICTIM in lost
    assert None not in lost


def test_a_stopped_rank_is_waited_for_until_the_deadline(store: TCPStore) -> None:
    workers = start(store, "stopped", 3)
    try:
        for rank, worker in enumerate(workers):
            if rank != VICTIM:
                result = json.loads(worker.communicate(timeout=SECONDS)[0])
                assert result == {"late": VICTIM, "left": {}}
        workers[VICTIM].send_signal(signal.SIGCONT)
        workers[VICTIM].communicate(timeout=SECONDS)
        assert workers[VICTIM].returncode == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_waiting_burns_no_core(store: TCPStore) -> None:
    for result in run(store, "idle"):
        assert result is not None
        assert result["spent"] < 0.2


def test_a_group_takes_less_than_32_mib(store: TCPStore) -> None:
    for result in run(store, "memory", 4):
        assert result is not None
        assert result["bytes"] < 32 * MIB


def test_kills_at_random_moments_are_named() -> None:
    script = Path(__file__).with_name("kills.py")
    done = subprocess.run(
        [sys.executable, str(script), "12"],
        env=dict(os.environ, OPENBLAS_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "24 survivors" in done.stdout
