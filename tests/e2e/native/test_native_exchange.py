"""Broadcasts and exchanges in the engine, of real processes: results and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.meshlib.compiled import NEEDS_CORE

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = NEEDS_CORE


@pytest.mark.parametrize("size", [2, 3, 5])
def test_results_are_right(meshrun, size):
    result = meshrun.run("--nproc-per-node", str(size), str(PROGRAMS / "exchanges.py"))
    assert result.code == 0, result.err
    assert result.out.split() == ["same"] * size


def test_what_goes_wrong_is_raised_as_ever(meshrun):
    result = meshrun.run("--nproc-per-node", "2", str(PROGRAMS / "exchanges_fail.py"))
    assert result.code == 0, result.err
    assert result.out.split() == ["raised"] * 2


def test_an_interrupt_in_the_middle_is_told(meshrun):
    result = meshrun.run("--nproc-per-node", "2", str(PROGRAMS / "broadcast_interrupted.py"))
    assert result.code == 0, result.err
    assert sorted(result.out.split()) == ["interrupted", "raised"]
