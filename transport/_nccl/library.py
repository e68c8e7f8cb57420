"""The functions of NCCL that are used, and the packages that provide them.

Experimental, not run on a GPU (``docs/run/gpu.md``).

NVIDIA's ``nccl4py`` is used if it is installed, else CuPy's ``cupy.cuda.nccl``, which CuPy plans to
drop. Both accept plain addresses, counts, NCCL's codes and stream handles.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from transport._errors import DistBackendError

OLDEST = 21000
"""NCCL 2.10, the first version with bfloat16 and AVG; encoded as major * 10000 + minor * 100."""
SPLITS = 21800
"""NCCL 2.18, the first version with ``ncclCommSplit``."""
NO_COLOR = -1
"""The color of members that are in no part of a split communicator."""

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
    """A member of an NCCL communicator. One thread at a time may use it, except for ``abort``."""

    def all_reduce(
        self, source: int, into: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Reduce ``count`` elements. Here and below, ``source`` may be ``into``."""
        ...

    def reduce(
        self, source: int, into: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """Reduce into ``root``'s ``into``."""
        ...

    def broadcast(
        self, source: int, into: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        """Copy ``root``'s ``source`` into every member's ``into``."""
        ...

    def all_gather(self, source: int, into: int, count: int, dtype: int, stream: int) -> None:
        """Gather ``count`` elements of each member, in rank order."""
        ...

    def reduce_scatter(
        self, source: int, into: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Reduce ``size * count`` elements; member i gets the ``count`` elements of part i."""
        ...

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send ``count`` elements to ``peer``."""
        ...

    def recv(self, into: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive ``count`` elements from ``peer``."""
        ...

    def split(self, color: int, key: int) -> NcclComm | None:
        """Return the communicator of the members with the same ``color``, ordered by ``key``; None
        for ``NO_COLOR``. Blocks until all members call it, which they must while no work runs.
        """
        ...

    def async_error(self) -> str | None:
        """Return an error that occurred in the background, or None."""
        ...

    def abort(self) -> None:
        """Abort all running work and free the communicator. May block. Any thread may call it."""
        ...

    def destroy(self) -> None:
        """Free the communicator. No work may be running."""
        ...


class NcclLibrary(Protocol):
    """A provider of NCCL."""

    name: str
    can_split: bool
    errors: tuple[type[Exception], ...]
    """The exceptions that its functions raise when NCCL reports an error."""

    def version(self) -> int:
        """Return the version of NCCL in NCCL's encoding."""
        ...

    def unique_id(self) -> bytes:
        """Return a new communicator's unique id."""
        ...

    def join(self, size: int, rank: int, unique_id: bytes) -> NcclComm:
        """Join with the calling thread's current device. Blocks until all members have joined."""
        ...

    def group_start(self) -> None:
        """Begin a group of calls of this thread that NCCL runs concurrently."""
        ...

    def group_end(self) -> None:
        """Start the calls made since ``group_start``."""
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
    """NCCL as provided by CuPy."""

    name = "cupy.cuda.nccl"

    def __init__(self) -> None:
        self._module: Any = import_module("cupy.cuda.nccl")
        if not getattr(self._module, "available", True):
            raise ImportError("CuPy finds no libnccl.so.2")
        self.version = self._module.get_version
        self.unique_id = self._module.get_unique_id
        self.group_start = self._module.groupStart
        self.group_end = self._module.groupEnd
        has_split = hasattr(self._module.NcclCommunicator, "commSplit")
        self.can_split = has_split and self.version() >= SPLITS
        self.errors = (self._module.NcclError,)

    def join(self, size: int, rank: int, unique_id: bytes) -> NcclComm:
        """Join with the calling thread's current device. Blocks until all members have joined."""
        return _CupyComm(self._module, self._module.NcclCommunicator(size, unique_id, rank))


class _Nccl4PyComm:
    # Results of ncclCommGetAsyncError without an error: success, and initialisation in progress.
    _NO_ERROR = (0, 7)

    def __init__(self, bindings: Any, comm: Any) -> None:
        self._bindings = bindings
        self._comm = comm

        def of(function: Any) -> Any:
            """Return ``function`` with the communicator bound as the argument before the stream."""

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
        return None if code in self._NO_ERROR else self._bindings.get_error_string(code)

    def abort(self) -> None:
        self._bindings.comm_abort(self._comm)

    def destroy(self) -> None:
        self._bindings.comm_destroy(self._comm)


class Nccl4Py:
    """NCCL as provided by nccl4py's bindings; its core API accepts only certain array types."""

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
        """Join with the calling thread's current device. Blocks until all members have joined."""
        ids = bytearray(unique_id)
        comm = self._bindings.comm_init_rank_scalable(size, rank, 1, ids, 0)
        return _Nccl4PyComm(self._bindings, comm)


def has_provider() -> bool:
    """Return whether a package that provides NCCL's functions is installed."""
    return find_spec("nccl") is not None or find_spec("cupy") is not None


def load_nccl() -> NcclLibrary:
    """Return NCCL. Raises DistBackendError, with what to install, if it is missing or too old."""
    reasons: list[str] = []
    for provider in (Nccl4Py, CupyNccl):
        try:
            library = provider()
            check_version(library)
        except Exception as error:  # noqa: BLE001 (providers raise different errors)
            reasons.append(f"{provider.name}: {error}")
        else:
            return library
    raise DistBackendError(
        f"backend 'nccl' found no usable NCCL ({'; '.join(reasons)}). Install it with"
        " `pip install nccl4py nvidia-nccl-cu13` (or -cu12), or send the arrays through the host"
        " with backend 'cuda:staged'"
    )


def check_version(library: NcclLibrary) -> None:
    """Raise DistBackendError if NCCL is older than ``OLDEST``."""
    version = library.version()
    if version < OLDEST:
        raise DistBackendError(
            f"NCCL {version_text(version)} is too old; expected {version_text(OLDEST)} or newer:"
            " update the package nvidia-nccl-cu12 or nvidia-nccl-cu13"
        )


def version_text(version: int) -> str:
    """Return a version in the usual form, such as ``2.27.3``."""
    # Before 2.9, the encoding was major * 1000.
    major, minor = divmod(version, 10000) if version >= 10000 else divmod(version, 1000)
    return f"{major}.{minor // 100}.{minor % 100}"
