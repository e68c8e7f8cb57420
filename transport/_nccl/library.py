"""The few functions of NCCL that are used, and who provides them.

Experimental, not run on a GPU (``docs/run/gpu.md``).

``nccl4py`` (NVIDIA's own) is preferred where it is installed; CuPy's ``cupy.cuda.nccl``, which its
maintainers want to give up, is the other one. Both take plain addresses, counts, NCCL's codes and
stream handles.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from transport._errors import DistBackendError

OLDEST = 21000
"""2.10: the first with bfloat16 and the average; as NCCL writes it, major * 10000 + minor * 100."""
SPLITS = 21800
"""2.18: the first with ``ncclCommSplit``."""
NO_COLOR = -1
"""The color of members that enter no part of a communicator that is split."""

SUM, PROD, MAX, MIN, AVG = range(5)
UINT8 = 1
DTYPES = {
    "int8": 0,
    "uint8": UINT8,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}


class NcclComm(Protocol):
    """A member of an NCCL communicator. All but ``abort`` from one thread at a time."""

    def all_reduce(
        self, source: int, into: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Reduce ``count`` elements; ``source`` may be ``into``, here and below."""
        ...

    def reduce(
        self, source: int, into: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """Reduce into ``root``'s ``into``."""
        ...

    def broadcast(
        self, source: int, into: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        """Copy ``root``'s ``source`` into everybody's ``into``."""
        ...

    def all_gather(self, source: int, into: int, count: int, dtype: int, stream: int) -> None:
        """Gather ``count`` elements of each member, one behind the other."""
        ...

    def reduce_scatter(
        self, source: int, into: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Reduce; member i gets the ``count`` elements of part i."""
        ...

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send to ``peer``."""
        ...

    def recv(self, into: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive from ``peer``."""
        ...

    def split(self, color: int, key: int) -> NcclComm | None:
        """Return the communicator of the members with this ``color``, in the order of ``key``;
        None for ``NO_COLOR``. All members call, with no work under way. Blocks until they have.
        """
        ...

    def async_error(self) -> str | None:
        """Return an error that occurred in the background, or None."""
        ...

    def abort(self) -> None:
        """End all work under way and release the communicator. May block; from any thread."""
        ...

    def destroy(self) -> None:
        """Release the communicator, on which no work is under way."""
        ...


class NcclLibrary(Protocol):
    """A provider of NCCL."""

    name: str
    can_split: bool
    errors: tuple[type[Exception], ...]
    """The exceptions that its functions raise when NCCL reports an error."""

    def version(self) -> int:
        """Return the version of NCCL, as NCCL writes it."""
        ...

    def unique_id(self) -> bytes:
        """Return a new communicator's unique id."""
        ...

    def join(self, size: int, rank: int, unique_id: bytes) -> NcclComm:
        """Enter on the calling thread's current device. Blocks until all members have."""
        ...

    def group_start(self) -> None:
        """Begin calls of the calling thread that are to go on side by side."""
        ...

    def group_end(self) -> None:
        """Start what was gathered since ``group_start``."""
        ...


class _CupyComm:
    def __init__(self, module: Any, comm: Any) -> None:
        self._comm = comm
        self._module = module
        self.all_reduce = self._comm.allReduce
        self.reduce = self._comm.reduce
        self.broadcast = self._comm.broadcast
        self.all_gather = self._comm.allGather
        self.reduce_scatter = self._comm.reduceScatter
        self.send = self._comm.send
        self.recv = self._comm.recv
        self.abort = self._comm.abort
        self.destroy = self._comm.destroy
        self._failed: type[Exception] = module.NcclError

    def split(self, color: int, key: int) -> NcclComm | None:
        comm = self._comm.commSplit(color, key)
        return None if comm is None else _CupyComm(self._module, comm)

    def async_error(self) -> str | None:
        try:
            self._comm.check_async_error()
        except self._failed as error:
            return str(error)
        return None


class CupyNccl:
    """NCCL as CuPy provides it."""

    name = "cupy.cuda.nccl"

    def __init__(self) -> None:
        self._module: Any = import_module("cupy.cuda.nccl")
        if not getattr(self._module, "available", True):
            raise ImportError("CuPy finds no libnccl.so.2")
        self.version = self._module.get_version
        self.unique_id = self._module.get_unique_id
        self.group_start = self._module.groupStart
        self.group_end = self._module.groupEnd
        has_it = hasattr(self._module.NcclCommunicator, "commSplit")
        self.can_split = has_it and self.version() >= SPLITS
        self.errors = (self._module.NcclError,)

    def join(self, size: int, rank: int, unique_id: bytes) -> NcclComm:
        """Enter on the calling thread's current device. Blocks until all members have."""
        return _CupyComm(self._module, self._module.NcclCommunicator(size, unique_id, rank))


class _Nccl4PyComm:
    # Results of ncclCommGetAsyncError without an error: success, and a start in progress.
    _FINE = (0, 7)

    def __init__(self, bindings: Any, comm: Any) -> None:
        self._bindings = bindings
        self._comm = comm

        def of(function: Any) -> Any:
            """Return ``function`` with the communicator as its argument before the stream."""

            def call(*arguments: Any) -> None:
                function(*arguments[:-1], comm, arguments[-1])

            return call

        self.all_reduce = of(bindings.all_reduce)
        self.reduce = of(bindings.reduce)
        self.broadcast = of(bindings.broadcast)
        self.all_gather = of(bindings.all_gather)
        self.reduce_scatter = of(bindings.reduce_scatter)
        self.send = of(bindings.send)
        self.recv = of(bindings.recv)

    def split(self, color: int, key: int) -> NcclComm | None:
        comm = self._bindings.comm_split(self._comm, color, key, 0)
        return None if color == NO_COLOR else _Nccl4PyComm(self._bindings, comm)

    def async_error(self) -> str | None:
        code = int(self._bindings.comm_get_async_error(self._comm))
        return None if code in self._FINE else self._bindings.get_error_string(code)

    def abort(self) -> None:
        self._bindings.comm_abort(self._comm)

    def destroy(self) -> None:
        self._bindings.comm_destroy(self._comm)


class Nccl4Py:
    """NCCL as nccl4py provides it: its bindings, since its core wants arrays of its own kinds."""

    name = "nccl4py"

    def __init__(self) -> None:
        self._bindings: Any = import_module("nccl.bindings.nccl")
        self._core: Any = import_module("nccl.core")
        self.version = self._bindings.get_version
        self.group_start = self._bindings.group_start
        self.group_end = self._bindings.group_end
        self.can_split = self.version() >= SPLITS
        self.errors = (self._bindings.NCCLError,)

    def unique_id(self) -> bytes:
        """Return a new communicator's unique id."""
        return bytes(self._core.get_unique_id())

    def join(self, size: int, rank: int, unique_id: bytes) -> NcclComm:
        """Enter on the calling thread's current device. Blocks until all members have."""
        ids = bytearray(unique_id)
        comm = self._bindings.comm_init_rank_scalable(size, rank, 1, ids, 0)
        return _Nccl4PyComm(self._bindings, comm)


def has_provider() -> bool:
    """True if a package is installed that brings NCCL."""
    return find_spec("nccl") is not None or find_spec("cupy") is not None


def load_nccl() -> NcclLibrary:
    """Return NCCL. Raises DistBackendError that says what to install, or that it is too old."""
    reasons: list[str] = []
    for provider in (Nccl4Py, CupyNccl):
        try:
            library = provider()
            check_version(library)
        except Exception as error:  # noqa: BLE001 (each has ways of its own to miss something)
            reasons.append(f"{provider.name}: {error}")
        else:
            return library
    raise DistBackendError(
        f"backend 'nccl' found no NCCL that it can use ({'; '.join(reasons)}). Install one with"
        " `pip install nccl4py nvidia-nccl-cu13` (or -cu12), or let the arrays travel via"
        " the host with backend 'cuda:staged'"
    )


def check_version(library: NcclLibrary) -> None:
    """Raise DistBackendError for an NCCL that lacks what is used here."""
    version = library.version()
    if version < OLDEST:
        raise DistBackendError(
            f"NCCL {version_text(version)} is too old; expected {version_text(OLDEST)} or newer:"
            " update the package nvidia-nccl-cu12 or nvidia-nccl-cu13"
        )


def version_text(version: int) -> str:
    """Return a version as people write it: ``2.27.3``."""
    # Before 2.9 the parts had fewer digits.
    major, rest = divmod(version, 10000) if version >= 10000 else divmod(version, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
