"""The libraries that can be measured: how a rank joins a job, and what gives it ``dist``."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, ClassVar

from meshlib.bench.cases import Floats

_TIMEOUT = timedelta(minutes=5)
LOOPBACK = "127.0.0.1"


class Library(ABC):
    """One library, in a rank's process. ``dist`` has c10d's functions once it has joined."""

    name: ClassVar[str]
    dist: Any

    @abstractmethod
    def host(self, size: int) -> int:
        """Start the job's store in this process and return its port; ``join`` comes next."""

    @abstractmethod
    def join(self, port: int, rank: int, size: int) -> None:
        """Enter the job whose store listens on ``port`` of this machine."""

    @abstractmethod
    def wrap(self, array: Floats) -> Any:
        """Return the library's array over the memory of ``array``."""

    @abstractmethod
    def version(self) -> str:
        """Return what was measured."""

    def leave(self) -> None:
        """End what ``join`` began."""
        self.dist.destroy_process_group()


class MeshlibTcp(Library):
    """This library, over its TCP transport."""

    name = "meshlib"
    backend: str | None = "tcp"

    def __init__(self) -> None:
        self.dist = importlib.import_module("meshlib")
        self._stores = importlib.import_module("transport.store.tcp_store")
        self._store: Any = None

    def host(self, size: int) -> int:  # noqa: D102
        self._store = self._stores.TCPStore(LOOPBACK, 0, is_master=True, timeout=_TIMEOUT)
        return self._store.port

    def join(self, port: int, rank: int, size: int) -> None:  # noqa: D102
        store = self._store or self._stores.TCPStore(LOOPBACK, port, timeout=_TIMEOUT)
        self._store = store
        self.dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT
        )

    def wrap(self, array: Floats) -> Any:  # noqa: D102
        return array

    def version(self) -> str:  # noqa: D102
        return f"meshlib {self.dist.__version__}, tcp"

    def leave(self) -> None:  # noqa: D102
        super().leave()
        self._store.close()


class TorchGloo(Library):
    """torch.distributed with Gloo."""

    name = "gloo"

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self.dist = importlib.import_module("torch.distributed")
        self._store: Any = None

    def host(self, size: int) -> int:  # noqa: D102
        self._store = self.dist.TCPStore(LOOPBACK, 0, is_master=True, timeout=_TIMEOUT)
        return self._store.port

    def join(self, port: int, rank: int, size: int) -> None:  # noqa: D102
        store = self._store or self.dist.TCPStore(LOOPBACK, port, timeout=_TIMEOUT)
        self._store = store
        self.dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT
        )

    def wrap(self, array: Floats) -> Any:  # noqa: D102
        return self._torch.from_numpy(array)

    def version(self) -> str:  # noqa: D102
        return f"torch {self._torch.__version__}, gloo"


LIBRARIES: dict[str, type[Library]] = {library.name: library for library in (MeshlibTcp, TorchGloo)}
