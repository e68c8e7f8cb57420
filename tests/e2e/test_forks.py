"""A forked child is not a rank: what it asks of its parent's job is refused, and nobody notices
it."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def test_a_forked_child_is_refused_and_noticed_by_nobody(meshrun):
    result = meshrun.run(
        "--nproc-per-node", "2", meshrun.script((PROGRAMS / "forks.py").read_text())
    )
    assert result.code == 0, result.err
    assert result.out.split() == ["whole"] * 2
