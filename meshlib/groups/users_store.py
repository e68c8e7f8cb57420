"""``UsersStore``: a group's own part of the job's store, for the user's keys."""

from __future__ import annotations

import threading

from meshlib.calls.context import RankContext
from meshlib.calls.state import Fate
from transport.errors import DistError
from transport.store.base import Store
from transport.store.prefix_store import PrefixStore


class UsersStore:
    """Made when it is asked for; waits on it end when the group breaks."""

    def __init__(self, context: RankContext, fate: Fate) -> None:
        self._context = context
        self._fate = fate
        self._making = threading.Lock()
        self._store: Store | None = None

    def get(self) -> Store:
        """Return the store. Raises ValueError after the group was destroyed."""
        fate = self._fate
        with self._making:
            store = self._store
            if store is None:
                store = PrefixStore(f"users/{fate.members.id}", self._context.store.clone())
                with fate.lock:
                    self._store, failure = store, fate.error
                if failure is not None:
                    store.end_waits(failure)
        if fate.destroyed:
            store.close()
            raise fate.unusable()
        return store

    def end_waits(self, error: DistError) -> None:
        """Have whoever waits for a key raise ``error``."""
        if self._store is not None:
            self._store.end_waits(error)

    def close(self) -> None:
        """Let go of it."""
        if self._store is not None:
            self._store.close()

    def end_in_a_fork(self) -> None:
        """Be usable in a fork of this rank's process."""
        self._making = threading.Lock()  # threads that are not here may have held it
