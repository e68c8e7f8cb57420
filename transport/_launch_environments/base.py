"""The interface to an engine that starts processes, and the reading of its variables."""

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
    """The environment does not say what is needed; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place, as its engine tells it. None: the engine does not say.

    ``launcher`` is its name, for messages.
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
    """The place of a node's agent (``meshrun``, once a node), as its engine tells it, or None.

    ``nodes`` is ``"4"`` or ``"2:4"``, ``ranks`` what ``--nproc-per-node`` takes.
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

    ``name`` is for messages, ``key`` for ``MESHLIB_LAUNCHER``. Both questions raise
    LaunchEnvironmentError for a value that is not a number, and for an answer that would make a
    wrong world.
    """

    name: ClassVar[str]
    key: ClassVar[str]

    def place(self, variables: Variables) -> RankPlace | None:
        """Return this process's place if the engine started it as a rank."""
        return None

    def node(self, variables: Variables) -> NodePlace | None:
        """Return this node's place if the engine started a process to start its ranks."""
        return None

    def hint(self, variables: Variables) -> str:
        """Return why a process that shows signs of this engine is not a rank of its; else
        ``""``."""
        return ""


def derived_port(job: str) -> int:
    """Return a port that all processes of ``job`` compute alike."""
    return _DERIVED_PORTS[zlib.crc32(job.encode()) % len(_DERIVED_PORTS)]


def number_in(variables: Variables, name: str) -> int | None:
    """Return the number that the variable ``name`` holds, None when it is not set or empty.

    Raises LaunchEnvironmentError for a value that is not a number.
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
    """Return the number that ``name`` holds; raise LaunchEnvironmentError without it."""
    number = number_in(variables, name)
    if number is None:
        raise LaunchEnvironmentError(f"{engine} started this process and {name} is not set")
    return number
