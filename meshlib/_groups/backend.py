"""Backend names: the values of ``init_process_group(backend=…)``, and the backend per device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from transport._communicators import backends

if TYPE_CHECKING:
    from transport._communicators.base import Communicator
    from transport._communicators.runtime import Membership

# The CPU backend's name in scripts written for torch.distributed.
_ALIASES = {"gloo": "auto"}
_DEFAULT_BY_DEVICE = {"cpu": "auto", "cuda": "nccl"}
DEVICES = ("cpu", "cuda")

FAKE = backends.FAKE
STAGED = "staged"
"""The backend for arrays on a GPU in a group without a GPU backend; works everywhere."""
# These backends also need the CPU's transport, for transfers via the host.
_WITH_CPU = frozenset({STAGED, "nccl", "cuda_ipc"})


class Backend(str):
    """A backend's name, in lower case: ``Backend("TCP") == "tcp"``.

    Raises ValueError, which lists the registered names, for any other name.
    """

    __slots__ = ()

    AUTO: ClassVar[str] = "auto"
    SHM: ClassVar[str] = "shm"
    TCP: ClassVar[str] = "tcp"
    INPROC: ClassVar[str] = "inproc"
    MPI: ClassVar[str] = "mpi"
    NCCL: ClassVar[str] = "nccl"
    STAGED: ClassVar[str] = STAGED
    FAKE: ClassVar[str] = FAKE
    GLOO: ClassVar[str] = "gloo"
    UNDEFINED: ClassVar[str] = "undefined"

    def __new__(cls, name: str) -> Backend:
        """Return ``name`` in lower case, checked."""
        parts = _check_string(name).split(",")
        return super().__new__(cls, ",".join(_parse_name(part) for part in parts))

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[[Membership], Communicator],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Register a third-party backend: ``func(membership)`` makes its communicators.

        ``devices`` (``"cpu"``, ``"cuda"``; default ``("cpu",)``) are the device types whose arrays
        it supports. ``extended_api`` is ignored; c10d has it. Raises ValueError for an invalid or
        registered name and for an unknown device, TypeError for a ``func`` that is not callable.
        """
        given = (devices,) if isinstance(devices, str) else tuple(devices or ("cpu",))
        strange = [device for device in given if device not in DEVICES]
        if strange:
            raise ValueError(f"devices has {strange}; expected some of {', '.join(DEVICES)}")
        backends.register(name, func, given)


def _check_string(backend: object) -> str:
    if not isinstance(backend, str):
        raise ValueError(f"backend must be a string such as 'tcp', got {backend!r}")
    return backend


def _parse_name(part: str) -> str:
    device, colon, name = part.strip().lower().rpartition(":")
    if name not in (*_ALIASES, "auto", Backend.UNDEFINED):
        backends.lookup(name)
    return f"{device}{colon}{name}"


def parse_backend(backend: str | None) -> dict[str, str]:
    """Return the backend for each device type that ``backend`` covers.

    ``None``, ``"auto"`` and ``"gloo"`` mean the default of each device. A plain name such as
    ``"tcp"`` is used for the devices that the backend supports; ``"cpu:tcp,cuda:nccl"`` names one
    per device. Every group has a CPU backend, which also carries arrays on a GPU if no backend for
    ``cuda`` is named. ``"fake"`` is for all devices. Raises ValueError for an unknown name or
    device, for a device named twice, and for ``"fake"`` with another backend.
    """
    text = "auto" if backend is None else _check_string(backend).lower()
    if text in ("auto", "undefined", "gloo", "cpu:gloo"):
        return {"cpu": _DEFAULT_BY_DEVICE["cpu"]}
    found: dict[str, str] = {}
    for part in text.split(","):
        device, _, name = part.strip().rpartition(":")
        if device and device not in DEVICES:
            raise ValueError(
                f"backend {backend!r} names device {device!r}; expected one of {', '.join(DEVICES)}"
            )
        name = _ALIASES.get(name, name)
        if name == "auto":
            name = _DEFAULT_BY_DEVICE[device or "cpu"]
        for covered in (device,) if device else backends.lookup(name).devices:
            if covered in found:
                raise ValueError(f"backend {backend!r} names a backend for {covered!r} twice")
            backends.lookup(name)
            found[covered] = name
    # Objects and barriers always use the CPU's backend.
    found.setdefault("cpu", _DEFAULT_BY_DEVICE["cpu"])
    if FAKE in found.values() and found != {"cpu": FAKE}:
        raise ValueError(
            f"backend {backend!r} has {FAKE!r} for one device; expected {FAKE!r} alone, for all"
        )
    return found


def is_fake(chosen: Mapping[str, str]) -> bool:
    """Return whether ``chosen`` contains the fake backend, with which a rank runs alone."""
    return FAKE in chosen.values()


def get_default_backend_for_device(device: str) -> str:
    """Return the default backend for arrays on ``device`` (``"cpu"``, ``"cuda"``, ``"cuda:1"``).

    Raises ValueError for an unknown device.
    """
    kind = str(device).partition(":")[0]
    if kind not in _DEFAULT_BY_DEVICE:
        raise ValueError(f"device {device!r} is unknown; expected one of {', '.join(DEVICES)}")
    return _DEFAULT_BY_DEVICE[kind]


def is_backend_available(backend: str) -> bool:
    """Return whether ``backend`` is registered (or an alias) and its dependencies are installed.

    Case does not matter. Raises ValueError for a value that is not a string.
    """
    name = _check_string(backend).lower()
    if name in (*_ALIASES, "auto"):
        return True
    return name in backends.available() and backends.lookup(name).installed


def make_device_communicator(membership: Membership, name: str, cpu: str | None) -> Communicator:
    """Return a communicator of the backend ``name``, for arrays on a GPU.

    ``cpu`` is the group's backend for the CPU, or None. The communicator works on ``DeviceFlat``
    buffers, which the adapter makes of arrays on a GPU.
    """
    factory: Any = backends.lookup(name).load()
    if name in _WITH_CPU and cpu is not None:
        return factory(membership, backends.lookup(cpu).make)
    return factory(membership)
