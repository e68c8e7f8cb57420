"""The interface to the engines that start processes, and functions that read their variables."""

from __future__ import annotations

import zlib
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from transport._errors import DistError

DEFAULT_PORT = 29500
_DERIVED_PORTS = range(20000, 29000)

Variables = Mapping[str, str]


class LaunchEnvironmentError(DistError, ValueError):
    """A needed environment variable is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place as given by its engine; None where the engine does not set a value.

    ``launcher`` is the engine's name, for messages.
    """

    launcher: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The place of a node's agent, its only ``meshrun``, as given by its engine; None where the
    engine does not set a value.

    ``nodes`` is ``"4"`` or ``"2:4"``; ``ranks`` is a value of ``--nproc-per-node``.
    """

    launcher: str
    nodes: str | None = None
    node: int | None = None
    ranks: str | None = None
    host: str | None = None
    port: int | None = None
    job: str | None = None


class LaunchEnvironment(ABC):
    """An engine, recognised by the variables that it sets.

    ``name`` is for messages, ``key`` for ``MESHLIB_LAUNCHER``. ``place`` and ``node`` raise
    LaunchEnvironmentError for a value that is not a number, and for values that would lead to wrong
    world sizes.
    """

    name: ClassVar[str]
    key: ClassVar[str]

    def place(self, variables: Variables) -> RankPlace | None:
        """Return this process's place if the engine started it as a rank, else None."""
        return None

    def node(self, variables: Variables) -> NodePlace | None:
        """Return this node's place if the engine started this process as its agent, else None."""
        return None

    def hint(self, variables: Variables) -> str:
        """Return why a process with some of this engine's variables is not a rank, or ``""``."""
        return ""


def derived_port(job: str) -> int:
    """Return a port that is the same for all processes of ``job``."""
    return _DERIVED_PORTS[zlib.crc32(job.encode()) % len(_DERIVED_PORTS)]


def number_in(variables: Variables, name: str) -> int | None:
    """Return the variable ``name`` as an integer, or None if it is not set or empty.

    Raises LaunchEnvironmentError for a value that is not an integer.
    """
    text = variables.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchEnvironmentError(
            f"environment variable {name} must be a whole number, got {text!r}"
        ) from None


def needed_number(variables: Variables, name: str, engine: str) -> int:
    """Return the variable ``name`` as an integer; raise LaunchEnvironmentError if it is not set."""
    number = number_in(variables, name)
    if number is None:
        raise LaunchEnvironmentError(f"{engine} started this process, but {name} is not set")
    return number
