"""A background thread with its own store client, shared by ranks that are threads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar, cast

from transport._errors import DistError, DistNetworkError, DistStoreError
from transport._store.base import Store

U = TypeVar("U")
END_SECONDS = 5.0


class SharedThread(ABC, Generic[U]):
    """A thread that runs while it has users.

    A thousand ranks that are threads must not start thousands of helper threads, so ``of`` returns
    one object for all ranks of a process.
    """

    name: str
    prepares: ClassVar[bool] = False
    """True if ``_prepare`` must finish before ``enter`` returns. Otherwise the thread makes its own
    client, so that ``enter`` needs no round trips to a server.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[U, None] = {}
        self._run: _ThreadLifetime | None = None

    @classmethod
    def of(cls, store: Store) -> SharedThread[U]:
        """Return a new object, or the shared one if the store and its ranks are in one process."""
        if store.in_one_process:
            return cast("SharedThread[U]", store.in_process(cls.name, cls))
        return cls()

    @property
    def users(self) -> list[U]:
        """The users that have entered and not left."""
        with self._lock:
            return list(self._users)

    def enter(self, user: U, store: Store) -> None:
        """Add ``user``; start the thread for the first one. ``store`` is the argument of ``of``."""
        with self._lock:
            self._users[user] = None
            if self._run is None:
                own = None
                # If several ranks share the thread, the first may leave, and close its store,
                # before the thread runs.
                if self.prepares or store.in_one_process:
                    own = store.clone()
                    self._prepare(own, user)
                self._run = _ThreadLifetime(store, own)
                self._run.begin(self)

    def leave(self, user: U) -> None:
        """Remove ``user``; end the thread after the last one."""
        with self._lock:
            self._users.pop(user, None)
            run = None if self._users else self._run
            if run is not None:
                self._run = None
                run.ending.set()
        if run is not None:
            run.end()

    def _prepare(self, store: Store, user: U) -> None:
        """Prepare ``store``, the thread's client; ``user`` is the first user."""

    @abstractmethod
    def work(self, store: Store, ending: threading.Event) -> None:
        """Work with ``store`` until ``ending``. It may raise DistStoreError: the store is gone."""

    def on_store_lost(self, error: DistError | None) -> None:
        """Handle the loss of the store before all users left; ``error`` is the symptom."""


class _ThreadLifetime:
    """One run of the thread, from the first user to the last; its client is ``own`` or a clone."""

    def __init__(self, store: Store, own: Store | None) -> None:
        self._store = store
        self._own = own
        self._lock = threading.Lock()
        self.ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, shared: SharedThread[U]) -> None:
        def run() -> None:
            failure: DistError | None = None
            try:
                store = self._client()
                if store is not None:
                    shared.work(store, self.ending)
            except (DistStoreError, DistNetworkError) as error:
                failure = error
            if not self.ending.is_set():
                shared.on_store_lost(failure)

        self._thread = threading.Thread(target=run, name=f"meshlib-{shared.name}", daemon=True)
        self._thread.start()

    def _client(self) -> Store | None:
        """Return the thread's client, None if the thread must end."""
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
