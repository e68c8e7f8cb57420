"""The libraries with c10d's functions: meshlib, and torch.distributed with Gloo."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, ClassVar

from meshlib._bench.cases import ROOT, Bound, Case, Floats
from meshlib._bench.libraries.library import LOOPBACK, TIMEOUT, Library, ping_pong


def bind_c10d(dist: Any, case: Case, wrap: Any) -> Bound:
    """Return the call of ``case`` in ``dist``, on the case's arrays converted by ``wrap``."""
    x = wrap(case.input)
    out = wrap(case.output) if case.has_output else x
    parts: list[Any] | None = None
    if case.rank == ROOT and case.name in ("gather", "scatter"):
        parts = [wrap(part) for part in case.parts(case.output if case.joins else case.input)]
    calls: dict[str, Bound] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, ROOT),
        "reduce": lambda: dist.reduce(x, ROOT),
        "all_gather": lambda: dist.all_gather_into_tensor(out, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x),
        "all_to_all": lambda: dist.all_to_all_single(out, x),
        "gather": lambda: dist.gather(x, parts, ROOT),
        "scatter": lambda: dist.scatter(out, parts, ROOT),
        "barrier": dist.barrier,
        "ping_pong": ping_pong(case.rank, partial(dist.send, x), partial(dist.recv, out)),
    }
    if case.name not in calls:
        raise ValueError(f"case {case.name!r} has no call in c10d")
    return calls[case.name]


class C10dLibrary(Library):
    """A library with c10d's functions, in ``dist``."""

    dist: Any
    backend: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._store: Any = None

    def host(self, size: int, address: str = LOOPBACK) -> int:
        self._store = self.dist.TCPStore(address, 0, is_master=True, timeout=TIMEOUT)
        return self._store.port

    def join(self, port: int, rank: int, size: int, address: str = LOOPBACK) -> None:
        if self._store is None:
            self._store = self.dist.TCPStore(address, port, timeout=TIMEOUT)
        self.dist.init_process_group(
            self.backend, store=self._store, rank=rank, world_size=size, timeout=TIMEOUT
        )

    def barrier(self) -> object:
        return self.dist.barrier()

    def bind(self, case: Case) -> Bound:
        return bind_c10d(self.dist, case, self.wrap)

    def wrap(self, array: Floats) -> Any:
        """Return the library's array over the memory of ``array``."""
        return array

    def leave(self) -> None:
        self.dist.destroy_process_group()


class Meshlib(C10dLibrary):
    """This library, over the backend that it chooses."""

    name = "meshlib"

    def __init__(self) -> None:
        super().__init__()
        import meshlib

        self.dist: Any = meshlib

    def version(self) -> str:
        return f"meshlib {self.dist.__version__}, {self.dist.get_backend()}"

    def leave(self) -> None:
        super().leave()
        self._store.close()


class MeshlibShm(Meshlib):
    """This library, over shared memory."""

    name = "meshlib-shm"
    backend: ClassVar[str | None] = "shm"


class MeshlibTcp(Meshlib):
    """This library, over its TCP transport."""

    name = "meshlib-tcp"
    backend: ClassVar[str | None] = "tcp"


class MeshlibSymmetric(Meshlib):
    """This library, on arrays in memory that all ranks of the host share."""

    name = "meshlib-symmetric"

    def empty(self, count: int, most: int) -> Floats:
        array = self.dist.group.WORLD.empty(most)  # all ranks must pass the same size
        assert array is not None
        return array[:count]


class TorchGloo(C10dLibrary):
    """torch.distributed with Gloo."""

    name = "gloo"
    backend: ClassVar[str | None] = "gloo"

    def __init__(self) -> None:
        super().__init__()
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self.dist: Any = importlib.import_module("torch.distributed")

    def wrap(self, array: Floats) -> Any:
        return self._torch.from_numpy(array)

    def version(self) -> str:
        return f"torch {self._torch.__version__}, gloo"
