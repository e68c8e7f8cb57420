"""Messages over shared memory, between real processes."""

from __future__ import annotations

from pathlib import Path

from tests.support.meshlib.compiled import NEEDS_CORE

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = NEEDS_CORE


def test_messages_between_processes(meshrun):
    result = meshrun.run("--start=exec", "-n", "2", str(PROGRAMS / "messages.py"))
    assert result.code == 0, result.err
    assert result.out.split() == ["fine", "fine"]
