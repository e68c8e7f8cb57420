"""Windows over every transport: those that share memory, messages, and two hosts with both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from transport import _native
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._hierarchical.auto import choose
from transport._place import Place

DEADLINE = 100.0
SIZE = 4
NOT_UPDATED = ("bool", "float16", "complex64", "complex128", ml_dtypes.bfloat16)
"""Dtypes that windows put and get, but do not update."""


def two_hosts(membership: Membership) -> Communicator:
    """Ranks 0 and 1 share a host, the others another one."""
    places = [Place("a" if rank < 2 else "b") for rank in membership.ranks]
    return choose(replace(membership, places=tuple(places)))


dist.Backend.register_backend("two_hosts", two_hosts)
BACKENDS = ["tcp", "inproc"]
if _native.core is not None:
    BACKENDS += ["shm", "two_hosts"]
everywhere = pytest.mark.parametrize("backend", BACKENDS)


def run(program: Callable[..., Any], backend: str, size: int = SIZE, *args: Any) -> list[Any]:
    return run_ranks(program, size, *args, backend=backend, timeout=DEADLINE)


def world() -> tuple[dist.ProcessGroup, int, int]:
    group = dist.group.WORLD
    return group, group.rank(), group.size()
