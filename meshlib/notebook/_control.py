"""The job in which a notebook calls its ranks: they and the notebook, which is the last one.

It is a World of its own beside that of the ranks' programs, in the same store, with remote calls.
A rank that dies is therefore known to the notebook, with the way in which it died.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from meshlib._calls.future import Future
from meshlib._job.current import current_world, install
from meshlib._job.starting.interrupts import defer_interrupts
from meshlib._job.world import World
from meshlib.notebook._functions import Packed
from meshlib.rpc import functions
from meshlib.rpc._api import RpcBackendOptions, init_rpc
from meshlib.rpc._calling.futures import polled
from meshlib.rpc._worker import LocalWorker
from transport import _environment as environment
from transport._choosing.tuning import agree, from_environment
from transport._communicators.runtime import Runtime
from transport._errors import CollectiveMismatchError
from transport._net.tls_choice import tls_from_environment
from transport._store.base import Store

JOB = "notebook/job"
"""The store's key of the job's description for an attaching notebook: JSON of name, ranks, mesh."""
NOTEBOOK = "notebook"
MEETING_SECONDS = 60.0


def turn_key(turn: int) -> str:
    """Return the key by which the ``turn``-th notebook of a job calls its ranks to a meeting."""
    return f"turn/{turn}"


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank is to run: a packed (function, arguments).

    Without ``what`` it is to leave its groups, and join the job anew with all others. ``cells`` are
    those that the rank has not seen, ``path`` are the notebook's folders of modules.
    """

    number: int
    what: Packed | None
    cells: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    path: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a task: a packed value, or an error: its description and, packed, itself.

    ``made_calls``: the rank has begun calls of its groups meanwhile.
    """

    value: Packed | None = None
    description: dict[str, Any] | None = None
    error: Packed | None = None
    made_calls: bool = False


class NotebookRank(Protocol):
    """A rank, as the notebook calls it."""

    def run(self, task: Task) -> Reply:
        """Run ``task`` in the main thread, after those that came before."""
        ...

    def interrupt(self, number: int) -> None:
        """Raise KeyboardInterrupt in the task ``number``, also if it has yet to begin."""
        ...

    def stack(self) -> str:
        """Return where the main thread is."""
        ...


class Notebook(Protocol):
    """A notebook, as its ranks call it."""

    def closed(self) -> Future[bool]:
        """Return the future that is done when the notebook leaves: whether the ranks are to end."""
        ...


class ControlWorld(World):
    """The World of such a job; ``host`` is this host's name among the others."""

    host: NotebookRank | Notebook

    @property
    def worker(self) -> LocalWorker:
        """This process's worker."""
        worker = self.rpc
        assert isinstance(worker, LocalWorker)
        return worker

    def call(self, to: int, func: Any, *args: Any, seconds: float = 0.0) -> Future[Any]:
        """Call ``func(*args)`` on the rank ``to``; 0 ``seconds``: the call may take any time."""
        return polled(self.worker.caller.call(to, func, args, {}, seconds))

    def leave(self) -> None:
        """End remote calls and this World, at once."""
        with suppress(CollectiveMismatchError):
            self.close(drain=0.0, linger=0.0)


def join(
    store: Store, rank: int, ranks: int, secret: bytes | None, host: NotebookRank | Notebook
) -> ControlWorld:
    """Meet ``ranks`` ranks and the notebook in ``store``, as ``rank`` (the notebook's is the last).

    Takes ``store`` over. Raises ``DistStoreError`` with those that do not come in a minute.
    """
    tuning = from_environment()
    agree(tuning, store, rank)
    address = os.environ.get(environment.HOST)
    runtime = Runtime(secret, address, tls_from_environment(), tuning=tuning)
    world = ControlWorld(
        store, rank, ranks + 1, runtime=runtime, backends={"cpu": "tcp"}, timeout=MEETING_SECONDS
    )
    world.host = host
    with ExitStack() as undo:
        interrupts = defer_interrupts()  # or Ctrl-C could leave a message to a rank half sent
        undo.callback(interrupts)
        world.join()
        world.on_close(interrupts)
        undo.callback(world.leave)
        install(world, thread_only=True)
        try:
            name = NOTEBOOK if rank == ranks else f"rank{rank}"
            init_rpc(name, rpc_backend_options=RpcBackendOptions(rpc_timeout=MEETING_SECONDS))
        finally:
            install(None, thread_only=True)
        undo.pop_all()
    return world


# ------------------------------------------------------------------ what is called


def run(task: Task) -> Reply:
    """See ``NotebookRank``."""
    return cast(NotebookRank, _host()).run(task)


def interrupt(number: int) -> None:
    """See ``NotebookRank``."""
    cast(NotebookRank, _host()).interrupt(number)


def stack() -> str:
    """See ``NotebookRank``."""
    return cast(NotebookRank, _host()).stack()


@functions.async_execution
def closed() -> Future[bool]:
    """See ``Notebook``."""
    return cast(Notebook, _host()).closed()


def _host() -> NotebookRank | Notebook:
    world = current_world()
    assert isinstance(world, ControlWorld)
    return world.host
