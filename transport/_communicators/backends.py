"""The registry of backends: names, communicator factories and device types."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    # The launcher checks backend names without importing NumPy.
    from transport._communicators.base import Communicator
    from transport._communicators.runtime import Membership

CommunicatorFactory: TypeAlias = "Callable[[Membership], Communicator]"
_ALONE = "transport._links.alone:AloneCommunicator"
ENTRY_POINT_GROUPS = {"cpu": "meshlib.backends", "cuda": "meshlib.backends.cuda"}
"""The entry point groups by device type. A backend may be in several groups."""
_CUDA = ("cuda",)
FAKE = "fake"
"""The backend for one rank that imitates a job without other processes."""
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A registered backend. ``factory`` is a callable, or ``"module:name"``, imported at use.

    ``requires`` names the optional modules that the backend needs. ``alone`` makes the communicator
    for host memory in groups of one.
    """

    name: str
    factory: CommunicatorFactory | str
    devices: tuple[str, ...] = ("cpu",)
    requires: tuple[str, ...] = ()
    alone: CommunicatorFactory | str = _ALONE

    @property
    def installed(self) -> bool:
        """True if all modules in ``requires`` can be found."""
        return all(find_spec(module) is not None for module in self.requires)

    def load(self) -> CommunicatorFactory:
        """Return the factory, after importing it if it is a name."""
        return _load(self.factory)

    def make(self, membership: Membership) -> Communicator:
        """Make the communicator of one member of a group, for host memory.

        A group of one uses ``alone``, because factories need not support groups of one.
        """
        factory = self.load()  # Raises for a missing module even if ``alone`` is used.
        return factory(membership) if membership.size > 1 else _load(self.alone)(membership)


def _load(factory: CommunicatorFactory | str) -> CommunicatorFactory:
    if callable(factory):
        return factory
    module, _, attribute = factory.partition(":")
    return getattr(importlib.import_module(module), attribute)


_MPI = "transport._mpi"
_ENTRIES: dict[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        BackendEntry("auto", "transport._hierarchical.auto:choose"),
        BackendEntry(
            "inproc",
            "transport._inproc.communicator:InprocCommunicator",
            alone="transport._inproc.communicator:make_alone",
        ),
        BackendEntry(FAKE, "transport._fake:FakeCommunicator"),
        BackendEntry("shm", "transport._shm:ShmCommunicator"),
        BackendEntry("tcp", "transport._tcp:TcpCommunicator"),
        BackendEntry(
            "mpi", f"{_MPI}:MpiCommunicator", requires=("mpi4py",), alone=f"{_MPI}:make_alone"
        ),
        BackendEntry("cuda_ipc", "transport._cuda_ipc:make_communicator", _CUDA, ("cupy",)),
        BackendEntry("nccl", "transport._nccl:make_communicator", _CUDA, ("cupy",)),
        BackendEntry("staged", "transport._cuda.staged:make_communicator", _CUDA),
    )
}


def register(name: str, factory: CommunicatorFactory | str, devices: Sequence[str]) -> None:
    """Add a backend under ``name``; case does not matter.

    ``factory`` is a callable, or ``"module:name"``, imported at use. ``devices`` are the device
    types of the arrays that the backend supports. Raises ValueError if the name is already
    registered, or if it has characters that cannot occur in ``"cpu:tcp,cuda:nccl"``. Raises
    TypeError for any other ``factory``.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"name must consist of letters, digits, _, - and ., got {name!r}")
    if not callable(factory) and not (isinstance(factory, str) and ":" in factory):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the factory of backend {name!r} must be callable or 'module:name', got {factory!r}"
        )
    key = name.lower()
    if key in available():
        raise ValueError(f"backend {name!r} is already registered; expected a new name")
    _ENTRIES[key] = BackendEntry(key, factory, tuple(devices))


def lookup(name: str) -> BackendEntry:
    """Return the backend called ``name``, from this registry or an installed entry point.

    Raises ValueError with a list of the available backends if the name is unknown.
    """
    key = name.lower()
    if key in _ENTRIES:
        return _ENTRIES[key]
    points = [(point, device) for point, device in _installed() if point.name.lower() == key]
    factories = {point.value for point, _ in points}
    if len(factories) > 1:
        raise ValueError(
            f"backend {name!r} is installed as {' and as '.join(sorted(factories))}; expected one"
        )
    if factories:
        return BackendEntry(key, factories.pop(), tuple(device for _, device in points))
    raise ValueError(f"backend {name!r} is unknown; expected one of {', '.join(available())}")


def over_tcp(membership: Membership) -> Communicator:
    """Make a communicator over TCP, which works between any two members."""
    return lookup("tcp").make(membership)


def available() -> list[str]:
    """Return the names of all backends, sorted."""
    found = {point.name.lower() for point, _ in _installed()}
    return sorted(found | set(_ENTRIES))


def _installed() -> list[tuple[EntryPoint, str]]:
    """Return the entry points of other packages' backends, each with its device type."""
    # Imported here because importlib.metadata is slow to import, and few programs need it.
    from importlib.metadata import entry_points

    return [
        (point, device)
        for device, group in ENTRY_POINT_GROUPS.items()
        for point in entry_points(group=group)
    ]
