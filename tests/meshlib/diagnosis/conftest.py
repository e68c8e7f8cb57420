"""Ranks that the scheduler stops are asked all the same, and waited for."""

from __future__ import annotations

import pytest

from meshlib._calls.failures import reporter

WINDOWS = ("ANSWER", "DOUBTFUL", "REASON", "REPORT", "ARRIVAL")


@pytest.fixture
def impatient() -> None:
    """Keep the short windows, for a test in which a rank is silent."""


@pytest.fixture(autouse=True)
def _long_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have reports wait long for answers and reasons, which all arrive in a healthy job."""
    if "impatient" not in request.fixturenames:
        for name in WINDOWS:
            monkeypatch.setattr(reporter, f"{name}_SECONDS", 30.0)
