"""Ranks that the scheduler stops are asked all the same, and waited for."""

from __future__ import annotations

import pytest

from meshlib._calls.failures import reporter

WINDOWS = ("ANSWER", "DOUBTFUL", "NEWS", "REPORT", "ARRIVAL")


@pytest.fixture
def impatient() -> None:
    """For a test in which somebody is silent: what is asked gets as little time as ever."""


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports wait for what they ask for, and for news: in good order all of it comes."""
    if "impatient" not in request.fixturenames:
        for name in WINDOWS:
            monkeypatch.setattr(reporter, f"{name}_SECONDS", 30.0)
