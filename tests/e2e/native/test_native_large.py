"""Large all_reduces in the engine, of real processes: bits and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.meshlib.compiled import NEEDS_CORE

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = NEEDS_CORE


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bits_are_numpy_s(meshrun, ranks):
    result = meshrun.run("--nproc-per-node", str(ranks), str(PROGRAMS / "large_sums.py"))
    assert result.code == 0, result.err
    assert result.out.split() == ["same"] * ranks


def test_what_goes_wrong_is_raised_as_ever(meshrun):
    result = meshrun.run("--nproc-per-node", "2", str(PROGRAMS / "large_sums_fail.py"))
    assert result.code == 0, result.err
    assert sorted(result.out.split()) == ["interrupted", "raised"]


def test_a_rank_that_is_killed_in_the_middle_is_missed(meshrun):
    result = meshrun.run("--nproc-per-node", "2", str(PROGRAMS / "large_sum_killed.py"))
    assert "missed" in result.out, result.err
