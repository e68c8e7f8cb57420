"""The compiled core of shared memory, and how long a rank may spin."""

from __future__ import annotations

from typing import Any

from transport._errors import DistBackendError
from transport._native import core
from transport._place import unsupported_reason
from transport._platform import available_cores


def the_core() -> Any:
    """Return the compiled core; raise DistBackendError if this process cannot share memory."""
    reason = unsupported_reason()
    if reason is not None:
        raise DistBackendError(f"{reason}; expected backend 'tcp' or 'auto'")
    return core


def may_spin(ranks: int) -> bool:
    """True if this process may use at least ``ranks`` cores."""
    return ranks <= available_cores()
