"""Remote calls between processes of which one dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshlib._trace.chains import describe
from meshlib._trace.dump import read

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

PROGRAM = (PROGRAMS / "deaths_of_workers.py").read_text()


def test_a_callees_and_an_owners_death_is_told_and_the_others_go_on(meshrun):
    script = meshrun.script(PROGRAM)
    result = meshrun.run(
        "-n", "3", "--on-failure", "continue", "--trace-dir", "trace", script, "callee"
    )
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if "worker2" in line]
    assert len(lines) == 4
    assert all("worker2 2 worker 'worker2' (rank 2) was killed by SIGKILL" in x for x in lines)
    assert "s after __main__.pass_on was called there" in lines[0]
    assert sum("done" in line for line in result.out.splitlines()) == 2
    assert "meshrun: rank 2 was killed by SIGKILL; the other ranks continue" in result.err
    chain = describe(read(meshrun.folder / "trace"))
    for message in (
        "(worker2), at",
        "rank 2 (worker2) has left no record, and had called __main__.until_cancelled on rank 1",
    ):
        assert message in chain, chain


def test_a_callers_death_cancels_and_frees_what_it_held_but_not_what_it_gave(meshrun):
    script = meshrun.script(PROGRAM)
    result = meshrun.run("-n", "2", "--on-failure", "continue", script, "caller")
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["done 0"]


def test_what_fails_because_its_worker_ends_is_no_answer(meshrun):
    """The callee's program leaves the job: its functions have no World any more."""
    script = meshrun.script(PROGRAM)
    result = meshrun.run("-n", "2", "--on-failure", "continue", script, "leaver")
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["lost 1", "lost 1"]


def test_rank_0_says_how_such_a_job_ended(meshrun):
    script = meshrun.script("import os; raise SystemExit(3 * (os.environ['RANK'] == '0'))")
    assert meshrun.run("-n", "2", "--on-failure", "continue", script).code == 3
