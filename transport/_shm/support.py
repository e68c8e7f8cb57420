"""Whether this process can share memory, and how it waits for those it shares memory with."""

from __future__ import annotations

import platform
import sys
from typing import Any

from transport._errors import DistBackendError
from transport._native import core, why_not
from transport._platform import available_cores

_MACHINES = ("x86_64", "aarch64")


def unsupported_reason() -> str | None:
    """Return why this process cannot share memory, with what to do about it; None: it can."""
    if not sys.platform.startswith("linux"):
        return f"the shared-memory transport needs Linux, this is {sys.platform}"
    machine = platform.machine()
    if machine not in _MACHINES or sys.maxsize != 2**63 - 1:
        expected = ", ".join(_MACHINES)
        return f"the shared-memory transport is proven on {expected} alone, this is {machine}"
    if core is None:
        return f"the shared-memory transport needs the compiled core: {why_not}"
    return None


def the_core() -> Any:
    """Return the compiled core; raise DistBackendError where this process cannot share memory."""
    reason = unsupported_reason()
    if reason is not None:
        raise DistBackendError(f"{reason}; expected backend 'tcp' or 'auto'")
    return core


def may_spin(ranks: int) -> bool:
    """Whether each of so many ranks on this host may have a core of its own."""
    return ranks <= available_cores()
