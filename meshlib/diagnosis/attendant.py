"""A thread that attends to ranks: to one, or to all that are threads of one process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar, cast

from transport.errors import DistError, DistNetworkError, DistStoreError
from transport.store.base import Store

U = TypeVar("U")
END_SECONDS = 5.0


class Attendant(ABC, Generic[U]):
    """Works as long as it has users, with a client of their store that is its own.

    A thousand ranks that are threads must not have thousands of threads beside them, each of which
    wakes up for what one could do for all: ``of`` returns the one of such ranks.
    """

    name: str
    prepares: ClassVar[bool] = False
    """Whether ``_prepare`` is to be done before ``enter`` returns; else the thread itself makes its
    client, which costs some round trips to a server.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[U, None] = {}
        self._shift: _Shift | None = None

    @classmethod
    def of(cls, store: Store) -> Attendant[U]:
        """Return a new one, or the one of the process that the store's users are threads of."""
        if store.in_one_process:
            return cast("Attendant[U]", store.in_process(cls.name, cls))
        return cls()

    @property
    def users(self) -> list[U]:
        """Those it works for."""
        with self._lock:
            return list(self._users)

    def enter(self, user: U, store: Store) -> None:
        """Work for ``user``, too; ``store`` is what ``of`` was given."""
        with self._lock:
            self._users[user] = None
            if self._shift is None:
                own = None
                # Where several ranks share the thread, the first may leave, and close its store,
                # before that runs.
                if self.prepares or store.in_one_process:
                    own = store.clone()
                    self._prepare(own, user)
                self._shift = _Shift(store, own)
                self._shift.begin(self)

    def leave(self, user: U) -> None:
        """Forget ``user``; the last one ends the thread."""
        with self._lock:
            self._users.pop(user, None)
            shift = None if self._users else self._shift
            if shift is not None:
                self._shift = None
                shift.ending.set()
        if shift is not None:
            shift.end()

    def _prepare(self, store: Store, user: U) -> None:
        """Get ``store``, with which a thread will work, ready; ``user`` is its first one."""

    @abstractmethod
    def work(self, store: Store, ending: threading.Event) -> None:
        """Work with ``store`` until ``ending``. DistStoreError is no fault: the store has gone."""

    def bereave(self, error: DistError | None) -> None:
        """Act on the store's having gone before its users; ``error`` is what it was noticed by."""


class _Shift:
    """One thread, from the first user to the last one, and its client: ``own``, else a clone of
    ``store``.
    """

    def __init__(self, store: Store, own: Store | None) -> None:
        self._store = store
        self._own = own
        self._lock = threading.Lock()
        self.ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, attendant: Attendant[U]) -> None:
        def run() -> None:
            failure: DistError | None = None
            try:
                store = self._client()
                if store is not None:
                    attendant.work(store, self.ending)
            except (DistStoreError, DistNetworkError) as error:
                failure = error
            if not self.ending.is_set():
                attendant.bereave(failure)

        self._thread = threading.Thread(target=run, name=f"meshlib-{attendant.name}", daemon=True)
        self._thread.start()

    def _client(self) -> Store | None:
        """Return the thread's client; None when it is to end."""
        if self._own is not None:
            return self._own
        own = self._store.clone()
        with self._lock:
            self._own = own
            if not self.ending.is_set():
                return own
        own.close()
        return None

    def end(self) -> None:
        self.ending.set()
        with self._lock:
            own = self._own
        if own is not None:
            own.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)
