"""Backend names: the values of ``init_process_group(backend=…)``, and each device's backend."""

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
"""The backend for arrays on a GPU if a group has none for them. It is always correct."""
# These take the CPU's transport along, for what they do via the host.
_WITH_CPU = frozenset({STAGED, "nccl", "cuda_ipc"})


class Backend(str):
    """A backend's name, in lower case: ``Backend("TCP") == "tcp"``.

    Raises ValueError, listing what there is, for a name that is not registered.
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
        """Add a third party's backend: ``func(membership)`` makes its communicators.

        ``devices`` (``"cpu"``, ``"cuda"``; default ``("cpu",)``) are the device types whose arrays
        it takes. ``extended_api`` is accepted for compatibility with c10d: ``membership`` has
        everything. Raises ValueError when the name is taken or is none, and for an unknown device,
        TypeError for a ``func`` that cannot be called.
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

    ``None``, ``"auto"`` and ``"gloo"`` mean the default of each device; ``"tcp"`` is used for the
    devices that it supports; ``"cpu:tcp,cuda:nccl"`` says it by device. Every group has one for
    the CPU. Without one for ``cuda``, arrays on a GPU travel via the host and that one. The backend
    ``"fake"`` is for all devices. Raises ValueError for an unknown name or device, one named twice,
    and another backend beside ``"fake"``.
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
    # Objects and barriers are the CPU's, whatever else a group is for.
    found.setdefault("cpu", _DEFAULT_BY_DEVICE["cpu"])
    if FAKE in found.values() and found != {"cpu": FAKE}:
        raise ValueError(
            f"backend {backend!r} has {FAKE!r} for one device; expected {FAKE!r} alone, for all"
        )
    return found


def is_fake(chosen: Mapping[str, str]) -> bool:
    """Return whether the backends ``chosen`` are for a rank alone."""
    return FAKE in chosen.values()


def get_default_backend_for_device(device: str) -> str:
    """Return the backend that arrays on ``device`` (``"cpu"``, ``"cuda"``, ``"cuda:1"``) get.

    Raises ValueError for another device.
    """
    kind = str(device).partition(":")[0]
    if kind not in _DEFAULT_BY_DEVICE:
        raise ValueError(f"device {device!r} is unknown; expected one of {', '.join(DEVICES)}")
    return _DEFAULT_BY_DEVICE[kind]


def is_backend_available(backend: str) -> bool:
    """Return whether ``backend`` can be used here: registered (or an alias such as ``gloo``), and
    what it needs is installed. Case does not matter. Raises ValueError for a value that is not a
    string.
    """
    name = _check_string(backend).lower()
    if name in (*_ALIASES, "auto"):
        return True
    return name in backends.available() and backends.lookup(name).installed


def make_device_communicator(membership: Membership, name: str, cpu: str | None) -> Communicator:
    """Make the communicator of the backend ``name``, for arrays on a GPU.

    ``cpu`` is the group's backend for the CPU, or None. The communicator takes ``DeviceFlat``,
    as the adapter makes them of arrays on a GPU.
    """
    factory: Any = backends.lookup(name).load()
    if name in _WITH_CPU and cpu is not None:
        return factory(membership, backends.lookup(cpu).make)
    return factory(membership)
