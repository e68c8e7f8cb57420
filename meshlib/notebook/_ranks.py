"""``Ranks``: the processes behind a notebook, to call functions on."""

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
    """Some ranks, to call functions on; made by ``Ranks`` and its ``[...]``."""

    def __init__(self, link: NotebookLink, ranks: Sequence[int]) -> None:
        self._link = link
        self.ranks: tuple[int, ...] = tuple(ranks)
        """Their numbers, ascending."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: Timeout | None = None) -> Any:
        """Call ``fn(*args)`` on these ranks, and return a dict of the results by rank.

        ``fn`` may be of a cell, a lambda or a closure. It runs in the main thread of each rank.
        What the ranks print appears here, each line behind its rank.

        A global that ``fn`` uses is the notebook's, which travels along, or, where the notebook has
        none of that name, the rank's own. What ``fn`` assigns to globals stays there.

        When ``fn`` raises on a rank, the others have a moment to end by themselves, and are then
        interrupted. Ctrl-C interrupts all. The ranks stay, with their variables. If calls of groups
        were made before, the ranks begin with new groups, which a ``DeviceMesh`` finds by itself.

        Raises ``RankError`` with the traceback of the rank that failed first: its exception is the
        cause. Raises ``RankFailedError`` when a rank has died, which ends all; ``RpcTimeoutError``
        past ``timeout`` seconds, with the place where the ranks are. Raises RuntimeError during
        another call, while a rank is not done with an earlier one, and after ``close``; TypeError
        for wrong arguments; what pickling them raises.
        """
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}: {fn!r}")
        seconds = None if timeout is None else to_seconds(timeout)
        return self._link.run(self.ranks, fn, args, seconds)

    def execute(self, source: str, timeout: Timeout | None = None) -> None:
        """Run ``source``, the text of a cell, on these ranks, as ``%%ranks`` does.

        Its names are global there, and live on. The value of a last expression is printed. Raises
        the errors of ``run``.
        """
        if not isinstance(source, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"source must be a str, got {type(source).__name__}")
        name = self._link.next_cell_name()
        remember_cell(name, source.splitlines(keepends=True))
        self._link.run(
            self.ranks, execute, (source, name), None if timeout is None else to_seconds(timeout)
        )

    def __getitem__(self, which: str | int | Sequence[int]) -> RankSet:
        """Return some of these ranks: those at ``"dp=0"`` of the mesh, one by its number, or
        several.

        Raises ValueError for coordinates that the mesh has not, and for ranks that are not among
        these.
        """
        return RankSet(self._link, self._link.choose(which, self.ranks))

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {rank_list(self.ranks)}, {self._link.described()}>"


class Ranks(RankSet):
    """All ranks of a job that a notebook uses. ``close`` or the end of a ``with`` block ends them.

    Made by ``local_ranks`` and ``meshlib.notebook.attach``.
    """

    @property
    def is_closed(self) -> bool:
        """True if the ranks have ended, or were left."""
        return self._link.closed_because is not None

    def close(self) -> None:
        """End the ranks, at once where they do not do it by themselves. Idempotent.

        Ranks to which this notebook has attached are left alone, for the next notebook.
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
    """Start ranks on this machine that stay, for a notebook or a prompt to call functions on.

    ``ranks`` is their number, or a mesh, ``"dp=2,tp=2"``, which ``init_device_mesh()`` without
    arguments finds on them. They have joined the job: ``all_reduce`` works at once. They end with
    ``close``, with the ``with`` block, and with this process, also when that is killed. They have
    ``timeout`` seconds to begin.

    Raises ValueError and TypeError for wrong arguments, ImportError without cloudpickle,
    ``DistStoreError`` when the ranks do not begin, with what they have printed.
    """
    config = None
    if isinstance(ranks, str):
        parse_mesh(ranks)  # or an error that says what is expected
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
    """Call the ranks of a job that runs ``python -m meshlib.notebook``, under meshrun or an engine.

    ``job`` names it as for ``meshlib top``: the launcher's process id, the beginning of its name,
    or ``HOST:PORT`` of its store, with the secret from the environment. None means the only job of
    this user on this machine. What its ranks print appears where the job was started. One notebook
    is attached at a time; ``close`` leaves the ranks for the next.

    Raises ValueError when ``job`` is none, or several; ImportError without cloudpickle;
    ``DistStoreError`` when its ranks do not answer.
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
