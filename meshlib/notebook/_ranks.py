"""``Ranks``: a notebook's ranks, on which it calls functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from meshlib._launcher.ranks.failure import rank_list
from meshlib._mesh.config import MeshConfig
from meshlib._mesh.spec import parse_mesh
from meshlib._monitor.jobs import RunningJob, find
from meshlib.notebook._control import JOB
from meshlib.notebook._functions import execute, remember_cell, require_cloudpickle
from meshlib.notebook._link import NotebookLink
from meshlib.notebook._local import LocalLauncher
from meshlib.notebook._output import EventQueue
from transport._checks import to_whole_number
from transport._errors import DistStoreError, StoreTimeoutError
from transport._store.prefix_store import PrefixStore
from transport._waiting.deadline import Timeout, to_seconds

_KEY_SECONDS = 10.0


class RankSet:
    """Ranks on which a notebook calls functions; created by indexing ``Ranks``."""

    def __init__(self, link: NotebookLink, ranks: Sequence[int]) -> None:
        self._link = link
        self.ranks: tuple[int, ...] = tuple(ranks)
        """The numbers of the ranks, ascending."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: Timeout | None = None) -> Any:
        """Call ``fn(*args)`` on these ranks, and return a dict of the results by rank.

        ``fn`` may be a cell's function, a lambda or a closure. It runs in the main thread of each
        rank. The ranks' output appears in the calling cell, each line prefixed by its rank.

        If a global of ``fn`` exists in the notebook, its value is sent with ``fn``; otherwise
        ``fn`` uses the rank's global. Globals that ``fn`` assigns remain on the rank.

        If ``fn`` raises on a rank, the others are interrupted after a moment. Ctrl-C interrupts all
        ranks. The ranks and their variables remain. If the failed call had made calls on groups,
        the ranks then use new groups, which a ``DeviceMesh`` finds by itself.

        Raises:
            RankError: With the traceback of the rank that failed first. Its exception is the cause.
            RankFailedError: If a rank has died, which ends all ranks.
            RpcTimeoutError: After ``timeout`` seconds, with the stacks of the unfinished ranks.
            RuntimeError: During another call, while a rank has not finished an earlier one, and
                after ``close``.
            TypeError: For wrong arguments. Pickling errors are raised unchanged.
        """
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}: {fn!r}")
        seconds = None if timeout is None else to_seconds(timeout)
        return self._link.run(self.ranks, fn, args, seconds)

    def execute(self, source: str, timeout: Timeout | None = None) -> None:
        """Run ``source``, the text of a cell, on these ranks, as ``%%ranks`` does.

        Its names become globals of the ranks. The value of a last expression is printed.
        ``timeout`` and the errors are those of ``run``.
        """
        if not isinstance(source, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"source must be a str, got {type(source).__name__}")
        name = self._link.next_cell_name()
        remember_cell(name, source.splitlines(keepends=True))
        self._link.run(
            self.ranks, execute, (source, name), None if timeout is None else to_seconds(timeout)
        )

    def __getitem__(self, which: str | int | Sequence[int]) -> RankSet:
        """Return some of these ranks, by mesh coordinates such as ``"dp=0"`` or by number.

        Raises ValueError for coordinates outside the mesh, and for ranks that are not in this set.
        """
        return RankSet(self._link, self._link.choose(which, self.ranks))

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {rank_list(self.ranks)}, {self._link.described()}>"


class Ranks(RankSet):
    """All ranks of a notebook's job, until ``close`` or the end of a ``with`` block.

    Created by ``local_ranks`` and ``meshlib.notebook.attach``.
    """

    @property
    def is_closed(self) -> bool:
        """True if the ranks have ended, or the notebook has left them."""
        return self._link.closed_because is not None

    def close(self) -> None:
        """End the ranks, by force if necessary. Idempotent.

        Ranks to which this notebook has attached continue, for the next notebook.
        """
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def local_ranks(ranks: int | str, *, timeout: Timeout = 60.0) -> Ranks:
    """Start persistent ranks on this machine, on which a notebook or a prompt calls functions.

    ``ranks`` is their number, or a mesh such as ``"dp=2,tp=2"``, which ``init_device_mesh()``
    without arguments then returns on the ranks. The ranks have joined the job, so ``all_reduce``
    works at once. They end with ``close``, with the ``with`` block, and with this process, even if
    it is killed. They must start within ``timeout`` seconds.

    Raises ValueError and TypeError for wrong arguments, ImportError without cloudpickle, and
    ``DistStoreError`` with the ranks' output if they do not start.
    """
    config = None
    if isinstance(ranks, str):
        parse_mesh(ranks)  # raises an error with the expectation
        config = MeshConfig.from_string(ranks)
        if config.world_size is None:
            raise ValueError(f"ranks is {ranks!r}, with a size to be inferred; expected all sizes")
    elif to_whole_number(ranks, "ranks") < 1:
        raise ValueError(f"ranks is {ranks}; expected at least 1, or a mesh such as 'dp=2,tp=2'")
    events = EventQueue()
    launcher = LocalLauncher(ranks, events)
    try:
        job = launcher.begin(to_seconds(timeout))
        return _attach(job, events, launcher)
    except BaseException:
        launcher.close(0.0)
        raise


def attach(job: str | None = None) -> Ranks:
    """Attach to the ranks of a job that runs ``python -m meshlib.notebook`` under a launcher.

    ``job`` names the job as for ``meshlib top``: the launcher's process id, the beginning of its
    name, or ``HOST:PORT`` of its store, with the secret from the environment. None means this
    user's only job on this machine. The ranks' output appears where the job was started. One
    notebook can be attached at a time; after ``close`` the ranks continue, for the next notebook.

    Raises ValueError if ``job`` matches no job or several, ImportError without cloudpickle, and
    ``DistStoreError`` if the ranks do not respond.
    """
    require_cloudpickle()
    return _attach(find(job), EventQueue(), None)


def _attach(job: RunningJob, events: EventQueue, launcher: LocalLauncher | None) -> Ranks:
    store = job.connect()
    try:
        about = json.loads(store.get(JOB, timeout=_KEY_SECONDS))
    except StoreTimeoutError:
        raise DistStoreError(
            f"the job {job.name} has no ranks for a notebook: expected one that was started with"
            " meshrun -m meshlib.notebook"
        ) from None
    finally:
        store.close()
    secret = bytes.fromhex(job.secret) if job.secret else None
    link = NotebookLink(about["ranks"], about["mesh"], events, launcher)
    link.join(PrefixStore(f"notebook/{about['name']}", job.connect()), secret)
    return Ranks(link, range(about["ranks"]))
