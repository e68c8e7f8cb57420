"""The job in which a notebook calls its ranks; the notebook is the last rank.

This job has its own World, in the store of the ranks' job, with remote calls. So the notebook
learns of a rank's death, and its cause.
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
"""The store's key of the job's description, JSON of name, ranks and mesh, for ``attach``."""
NOTEBOOK = "notebook"
MEETING_SECONDS = 60.0


def turn_key(turn: int) -> str:
    """Return the key that the ``turn``-th notebook of a job sets to connect to its ranks."""
    return f"turn/{turn}"


@dataclass(frozen=True, slots=True)
class Task:
    """A task for a rank: a packed (function, arguments).

    Without ``what``, the rank leaves its groups and rejoins the job, as all others do. ``cells``
    has those that are new to the rank, ``path`` the notebook's folders of modules.
    """

    number: int
    what: Packed | None
    cells: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    path: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a task: a packed value, or an error as a description and, if possible, packed.

    ``made_calls``: the rank has begun calls of its groups during the task.
    """

    value: Packed | None = None
    description: dict[str, Any] | None = None
    error: Packed | None = None
    made_calls: bool = False


class NotebookRank(Protocol):
    """The methods of a rank that the notebook calls."""

    def run(self, task: Task) -> Reply:
        """Run ``task`` in the main thread, after all earlier tasks."""
        ...

    def interrupt(self, number: int) -> None:
        """Raise KeyboardInterrupt in the task ``number``, even if it has not begun."""
        ...

    def stack(self) -> str:
        """Return the main thread's stack as text."""
        ...


class Notebook(Protocol):
    """The method of a notebook that its ranks call."""

    def closed(self) -> Future[bool]:
        """Return a future that is set when the notebook leaves: True if the ranks must end."""
        ...


class ControlWorld(World):
    """The World of this job; ``host`` handles the calls of the other members."""

    host: NotebookRank | Notebook

    @property
    def worker(self) -> LocalWorker:
        """The remote-call worker of this process."""
        worker = self.rpc
        assert isinstance(worker, LocalWorker)
        return worker

    def call(self, to: int, func: Any, *args: Any, seconds: float = 0.0) -> Future[Any]:
        """Call ``func(*args)`` on the rank ``to``, with a deadline in ``seconds``; 0: none."""
        return polled(self.worker.caller.call(to, func, args, {}, seconds))

    def leave(self) -> None:
        """End remote calls and this World, without waiting."""
        with suppress(CollectiveMismatchError):
            self.close(drain=0.0, linger=0.0)


def join(
    store: Store, rank: int, ranks: int, secret: bytes | None, host: NotebookRank | Notebook
) -> ControlWorld:
    """Join ``ranks`` ranks and the notebook in ``store``, as ``rank`` (the notebook is the last).

    Takes ownership of ``store``. Raises ``DistStoreError`` with the ranks that do not arrive in a
    minute.
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
        interrupts = defer_interrupts()  # otherwise Ctrl-C could cut a message to a rank
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


# ------------------------------------------------------------------ remotely called


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
