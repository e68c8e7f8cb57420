"""The job's store as a ``torch.distributed`` store, and its rendezvous ``meshlib://``.

``init_process_group(..., init_method="meshlib://")`` finds the ranks that ``meshrun``, Slurm, MPI
or Kubernetes started. It uses the launcher's store if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshlib._job.current import current_world, find_world
from meshlib._job.starting.init import init_process_group
from meshlib._job.world import DEFAULT_TIMEOUT, World
from transport._rendezvous.rank_claims import next_job_part
from transport._store.base import Store, Value
from transport._store.prefix_store import PrefixStore, underlying

_c10d: Any = import_module("torch.distributed")


class TorchStore(_c10d.Store):
    """A part of ``world``'s store for one rendezvous, closed with the World.

    ``made_world``: the World was created for PyTorch, and ends with its groups.
    """

    def __init__(self, world: World, made_world: bool) -> None:
        super().__init__()
        # The store may still have keys of an earlier default group.
        self._store: Store = next_job_part(PrefixStore("torch", world.store.clone()), world.rank)
        self.made_world = made_world
        world.on_close(self._store.close)
        world.on_close(lambda: setattr(self, "made_world", False))  # keeps self alive for C++

    def set(self, key: str, value: Value) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def append(self, key: str, value: Value) -> None:
        self._store.append(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._store.multi_set(keys, values)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Any:
        return self


def meshlib_rendezvous(
    url: str, timeout: timedelta | float = DEFAULT_TIMEOUT, **_: Any
) -> Iterator[tuple[TorchStore, int, int]]:
    """Yield this process's torch store, rank and world size, as the handler of ``meshlib://``.

    Initialises meshlib if the program has not. Raises the errors of ``meshlib.init_process_group``.
    """
    made_world = find_world() is None
    if made_world:
        query = parse_qs(urlsplit(url).query)
        rank, size = (int(query.get(name, ["-1"])[0]) for name in ("rank", "world_size"))
        init_process_group(timeout=timeout, rank=rank, world_size=size)
    world = current_world()
    yield TorchStore(world, made_world), world.rank, world.size
    raise RuntimeError(f"{url!r} supports only one rendezvous")


def claim_world(store: Any) -> bool:
    """Return whether the World was created with ``store``; True only for the first caller."""
    store = underlying(store)
    if not isinstance(store, TorchStore):
        return False
    made, store.made_world = store.made_world, False
    return made
