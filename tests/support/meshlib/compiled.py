"""Marks of tests whose processes need the compiled core."""

from __future__ import annotations

import pytest

from transport._native import core

NEEDS_CORE = [
    pytest.mark.processes,
    pytest.mark.skipif(core is None, reason="this installation has no compiled core"),
]
