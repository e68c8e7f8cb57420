"""The benchmarks of this project count correctly, and judge by its targets."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from meshlib._bench.libraries import environments
from meshlib._bench.run import CaseResult, Cell
from tests.benchmarks import counts, setup_peers
from tests.benchmarks.counters import counting
from tests.benchmarks.counters.system_calls import CannotCountError, system_calls
from tests.benchmarks.counts import Count, count
from tests.benchmarks.targets import AIMS, plan_cells, table


def test_copies_are_counted_where_they_happen() -> None:
    source = b"""
def work(a, b, ends):
    a[:3] = b[:3]                   # 12 bytes
    a[0] = 7                        # a control word, not counted
    a[a > 100] = 0                  # none is
    np.copyto(a, b)                 # 40
    np.add(a, b, out=a)             # reduced: 40
    memory = memoryview(bytearray(8))
    memory[2:6] = b"abcd"           # 4
    table = {}
    table["x"] = 1
    ends[0].send(b"12345")          # 5
    ends[1].recv_into(memory[:5])   # and 5
    return a, table, bytes(memory)
"""
    counter = counting.Counter()
    module = {"np": np, counting.NAME: counter}
    exec(counting.rewritten(source, "work.py"), module)
    ends = socket.socketpair()
    a, table, memory = module["work"](np.zeros(10, np.float32), np.arange(10, dtype="f4"), ends)
    for end in ends:
        end.close()
    assert counter.counted == counting.Counted(copied=56, reduced=40, sockets=10)
    assert a.tolist() == (2 * np.arange(10)).tolist()  # and the work is done
    assert table == {"x": 1}
    assert memory == b"12345d\0\0"


@pytest.mark.processes
def test_what_calls_cost_is_counted() -> None:
    libraries = ("meshlib-tcp", "gloo")
    *others, found = count([Cell("all_reduce", 1 << 20, 2, libraries)])
    assert isinstance(found, Count)
    # Each rank reduces at least half, and sends and receives as much as the array in all.
    assert found.reduced >= 1 << 20
    assert 4 << 20 <= found.sockets <= (4 << 20) + 10_000
    if others:
        assert isinstance(others[0], CannotCountError)
        assert found.system_calls is None
    else:
        assert found.system_calls is not None
        assert found.system_calls > 0
    assert f"{found.sockets:,.0f}" in counts.row(found)
    assert counts.as_records([found])[0]["reduced"] == found.reduced


def test_a_machine_without_perf_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(CannotCountError, match="perf is not installed"),
        system_calls([1], tmp_path),
    ):
        pass
    perf = tmp_path / "perf"
    perf.write_text("#!/bin/sh\necho 'no permission' >&2\nexit 1\n")
    perf.chmod(0o755)
    with pytest.raises(CannotCountError, match="no permission"), system_calls([1], tmp_path):
        pass


def test_aims_are_measured_once_and_judged_by_their_ratios() -> None:
    aims = [aim for aim in AIMS if aim.row in (1, 7)]
    libraries = ["meshlib", "meshlib-symmetric", "openmpi", "mpich"]
    cells = plan_cells(aims, [2], libraries)
    assert len({(cell.case, cell.nbytes) for cell in cells}) == len(cells)
    large = [cell for cell in cells if cell.nbytes == 64 << 20]
    assert [cell.case for cell in large] == ["copy", "all_reduce"]
    assert set(large[1].libraries) == set(libraries)

    def result(case: str, nbytes: int, library: str, seconds: float) -> CaseResult:
        return CaseResult(case, nbytes, 2, library, "", [[seconds]], [[seconds / len(library)]])

    results = [
        result("copy", 64 << 20, "meshlib", 0.020),
        result("all_reduce", 64 << 20, "meshlib", 0.016),
        result("all_reduce", 64 << 20, "meshlib-symmetric", 0.040),
        result("all_reduce", 64 << 20, "openmpi", 0.030),
        result("all_reduce", 64 << 20, "mpich", 0.020),
        result("all_reduce", 64 << 10, "meshlib", 1e-5),
        result("all_reduce", 64 << 10, "openmpi", 1e-5),
        result("all_reduce", 64 << 10, "mpich", 9.0),
    ]
    lines = table(aims, [2], results).splitlines()
    start = "| 1 | all_reduce, private | 2 | 64 KiB |"
    assert f"{start} 10.0 | openmpi | 10.0 | 1.00 | ≤ 1 | reached | 1.00 |" in lines
    assert lines[-2].endswith(
        "| 16,000.0 | mpich | 20,000.0 | 0.80 | ≤ 0.75 | **not reached** | 0.57 |"
    )
    assert lines[-1].endswith("| copying | 13.4 GB/s | 0.50 | ≥ 0.7 | **not reached** | – |")
    assert sum("not measured" in line for line in lines) == 3  # 1, 4 and 16 MiB


def test_an_environment_that_fails_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def create(folder: Path, **_: object) -> None:
        folder.mkdir()

    def install(command: list[str], *, check: bool) -> None:
        assert check
        if "mpich" in command:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(setup_peers.venv, "create", create)
    monkeypatch.setattr(setup_peers.subprocess, "run", install)
    assert setup_peers.main(["openmpi", "mpich", "jax"]) == 1
    assert "mpich: not installed" in capsys.readouterr().err
    assert [environments.is_set_up(peer) for peer in ("openmpi", "mpich", "jax")] == [1, 0, 1]
