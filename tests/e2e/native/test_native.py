"""Small calls in the engine, of real processes: results, bytes, records and errors."""

from __future__ import annotations

from pathlib import Path

from tests.support.meshlib.compiled import NEEDS_CORE

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = NEEDS_CORE


def test_results_and_records_are_right(meshrun):
    result = meshrun.run("--nproc-per-node", "3", str(PROGRAMS / "sums.py"))
    assert result.code == 0, result.err
    assert result.out.split() == ["same"] * 3


def test_what_goes_wrong_is_raised_as_ever(meshrun):
    result = meshrun.run("--nproc-per-node", "2", str(PROGRAMS / "sums_fail.py"))
    assert result.code == 0, result.err
    assert result.out.split() == ["raised"] * 2


def test_an_interrupt_in_the_middle_is_told(meshrun):
    result = meshrun.run("--nproc-per-node", "2", str(PROGRAMS / "sum_interrupted.py"))
    assert result.code == 0, result.err
    assert sorted(result.out.split()) == ["interrupted", "raised"]
