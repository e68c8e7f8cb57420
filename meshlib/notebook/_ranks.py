"""``Ranks``: the processes behind a notebook, to call functions on."""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Self

from meshlib._calls.future import Future
from meshlib._launcher.ranks.failure import ErrorRecord, RankExit, first_failure, rank_list
from meshlib._mesh.config import MeshConfig
from meshlib._mesh.spec import parse_mesh
from meshlib._monitor.jobs import Job
from meshlib.notebook import _control
from meshlib.notebook._control import JOB, ControlWorld, Reply, Task, turn_key
from meshlib.notebook._functions import cells, execute, pack, remember_cell, unpack
from meshlib.notebook._local import LocalLauncher
from meshlib.notebook._output import Answered, Ended, Marked, News, Printed, show
from meshlib.rpc import RpcTimeoutError, WorkerLostError
from meshlib.testing import RankError
from transport._checks import to_whole_number
from transport._deadline import Timeout, to_seconds
from transport._errors import DistError, DistStoreError, RankFailedError, StoreTimeoutError
from transport._store.prefix_store import PrefixStore, underlying

_OTHERS_SECONDS = 0.8
"""What the other ranks get to end by themselves after one has failed: meshrun's own patience."""
_STOP_SECONDS = 5.0
"""How long ranks may take to end an interrupted task."""
_MARK_SECONDS = 2.0
_LOSS_SECONDS = 5.0
_JOIN_ANEW_SECONDS = 60.0
_KEY_SECONDS = 10.0


class RankSet:
    """Some ranks, to call functions on; made by ``Ranks`` and its ``[...]``."""

    def __init__(self, link: _Link, ranks: Sequence[int]) -> None:
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
        """Run ``source``, the text of a cell, on these ranks: what ``%%ranks`` does.

        Its names are global there, and live on. The value of a last expression is printed. Raises
        as ``run`` does.
        """
        if not isinstance(source, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"source must be a str, got {type(source).__name__}")
        name = self._link.next_cell_name()
        remember_cell(name, source.splitlines(keepends=True))
        self._link.run(self.ranks, execute, (source, name), timeout and to_seconds(timeout))

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
        """Whether the ranks have ended, or were left."""
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
    news = News()
    launcher = LocalLauncher(ranks, news)
    try:
        job = launcher.begin(to_seconds(timeout))
        return _attach(job, news, launcher)
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
    from meshlib._monitor.jobs import find
    from meshlib.notebook._functions import require_cloudpickle

    require_cloudpickle()
    return _attach(find(job), News(), None)


def _attach(job: Job, news: News, launcher: LocalLauncher | None) -> Ranks:
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
    link = _Link(about["ranks"], about["mesh"], news, launcher)
    link.join(PrefixStore(f"notebook/{about['name']}", job.connect()), secret)
    return Ranks(link, range(about["ranks"]))


class _Link:
    """A notebook's link to its ranks. One call at a time."""

    def __init__(
        self, size: int, mesh: str | None, news: News, launcher: LocalLauncher | None
    ) -> None:
        self.closed_because: str | None = None
        self._size = size
        self._mesh = None if mesh is None else MeshConfig.parse(mesh).mesh_for(size)
        self._news = news
        self._launcher = launcher
        self._left: Future[bool] = Future()
        self._world: ControlWorld
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._cell_numbers = count(1)
        self._cells_sent: list[set[str]] = [set() for _ in range(size)]
        self._late: dict[int, Future[Reply]] = {}
        """By rank, the calls that an interrupt did not end."""
        self._join_anew = False

    def join(self, store: PrefixStore, secret: bytes | None) -> None:
        """Meet the ranks in ``store``."""
        turn = store.add("turns", 1)
        store.set(turn_key(turn), b"1")
        place = PrefixStore(turn_key(turn), store)
        try:
            self._world = _control.join(place, self._size, self._size, secret, self)
        except DistStoreError as error:
            raise DistStoreError(
                f"the ranks do not answer, perhaps another notebook is attached to them: {error}"
            ) from error
        atexit.register(self.close)

    def closed(self) -> Future[bool]:
        """See ``Notebook``."""
        return self._left

    def described(self) -> str:
        """Return their mesh, and whether they are still there."""
        mesh = "no mesh" if self._mesh is None else f"mesh {self._mesh.described()}"
        return f"{mesh}{', closed' if self.closed_because else ''}"

    def next_cell_name(self) -> str:
        """Return what tracebacks call the next cell that is sent as text."""
        return f"<ranks cell {next(self._cell_numbers)}>"

    def choose(self, which: object, among: Sequence[int]) -> list[int]:
        """Return the ranks that ``which`` names; see ``RankSet``."""
        if isinstance(which, str):
            found = self._at(which)
            return [rank for rank in among if rank in found]
        single = not isinstance(which, Sequence)
        ranks = sorted({to_whole_number(one, "rank") for one in ([which] if single else which)})
        for rank in ranks:
            if rank not in among:
                raise ValueError(f"rank {rank} is not among {rank_list(among)}")
        if not ranks:
            raise ValueError("no rank is named; expected at least one")
        return ranks

    def _at(self, text: str) -> set[int]:
        if self._mesh is None:
            raise ValueError(
                f"{text!r} needs a mesh: start the ranks with one, local_ranks('dp=2,tp=2')"
            )
        names = self._mesh.mesh_dim_names or ()
        wanted: dict[int, int] = {}
        for item in text.split(","):
            name, _, value = item.partition("=")
            name, value = name.strip(), value.strip()
            if name not in names or not value.isdecimal():
                raise ValueError(
                    f"{item.strip()!r} is no coordinate of the mesh {self._mesh.described()};"
                    " expected DIM=NUMBER"
                )
            dim = names.index(name)
            if int(value) >= self._mesh.shape[dim]:
                raise ValueError(
                    f"{item.strip()!r}: dim {name!r} has the coordinates 0 to"
                    f" {self._mesh.shape[dim] - 1}"
                )
            wanted[dim] = int(value)
        found: set[int] = set()
        for rank in range(self._size):
            place = self._mesh.coordinate_of(rank)
            if place is not None and all(place[dim] == at for dim, at in wanted.items()):
                found.add(rank)
        return found

    # ------------------------------------------------------------------ calls

    def run(
        self, ranks: Sequence[int], fn: Callable[..., Any], args: Any, seconds: float | None
    ) -> dict[int, Any]:
        """See ``RankSet.run``."""
        with self._one_at_a_time():
            self._check_usable()
            what = pack((fn, args))
            if self._join_anew:
                self._make_groups_anew()
            tasks: dict[int, Task] = {}
            number = next(self._numbers)
            for rank in ranks:
                fresh = cells(self._cells_sent[rank])
                self._cells_sent[rank].update(fresh)
                path = list(sys.path) if self._launcher is not None else []
                tasks[rank] = Task(number, what, fresh, path)
            return _Call(self, number, tasks, seconds).results()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another call of these ranks is under way; expected one at a time")
        try:
            yield
        finally:
            self._lock.release()

    def _check_usable(self) -> None:
        if self.closed_because is not None:
            raise RuntimeError(f"these ranks are closed: {self.closed_because}")
        self._late = {rank: late for rank, late in self._late.items() if not late.done()}
        if self._late:
            where = self.stacks(self._late)
            raise RuntimeError(
                f"{rank_list(sorted(self._late))} has not ended an earlier, interrupted call."
                f" Wait for it, or close() these ranks and start others.\n{where}"
            )

    def start(self, tasks: Mapping[int, Task]) -> dict[int, Future[Reply]]:
        """Begin ``tasks``, by rank; ``Answered`` will follow for each."""
        calls: dict[int, Future[Reply]] = {}
        for rank, task in tasks.items():
            call = calls[rank] = self._world.call(rank, _control.run, task)
            call.add_done_callback(partial(self._answered, rank))
        return calls

    def _answered(self, rank: int, _: object) -> None:
        self._news.put(Answered(rank))

    def interrupt(self, ranks: Sequence[int], number: int) -> None:
        """Interrupt the task ``number`` on ``ranks``."""
        for rank in ranks:
            with suppress(DistError):
                self._world.call(rank, _control.interrupt, number, seconds=_STOP_SECONDS)

    def stacks(self, ranks: Mapping[int, object]) -> str:
        """Return where ``ranks`` are."""
        lines: list[str] = []
        for rank in sorted(ranks):
            try:
                at = self._world.call(rank, _control.stack, seconds=_STOP_SECONDS).wait()
            except DistError as error:
                at = f"  {error}\n"
            lines.append(f"rank {rank} is at\n{at or '  its beginning or end'}")
        return "".join(lines)

    def next_event(self, until: float) -> object:
        """Show what is printed; return the next other event, or None at the moment ``until``."""
        while True:
            event = self._news.next(until)
            if not isinstance(event, Printed):
                return event
            show(event)

    def await_marks(self, ranks: Sequence[int], number: int, seen: set[Marked]) -> None:
        """Show all that ``ranks`` have printed in task ``number``; ``seen``: marks that came."""
        if self._launcher is None:
            return
        missing = {Marked(stream, rank, number) for stream in (1, 2) for rank in ranks} - seen
        until = time.monotonic() + _MARK_SECONDS  # the program may have closed its output
        while missing and (event := self.next_event(until)) is not None:
            missing.discard(event)  # pyright: ignore[reportArgumentType]

    def call_failed(self, made_calls: bool, late: Mapping[int, Future[Reply]]) -> None:
        """Note what a call that failed has left: ranks that are not done, groups out of step."""
        self._late.update(late)
        self._join_anew = self._join_anew or made_calls or bool(late)

    def _make_groups_anew(self) -> None:
        number = next(self._numbers)
        tasks = {rank: Task(number, None) for rank in range(self._size)}
        _Call(self, number, tasks, _JOIN_ANEW_SECONDS).results()
        self._join_anew = False

    def lose(self, error: WorkerLostError) -> RankFailedError:
        """Close the link to ranks of which one is lost; return the error to raise."""
        said: list[str] = []
        until = time.monotonic() + _LOSS_SECONDS
        while self._launcher is not None:
            event = self._news.next(until)
            if event is None or isinstance(event, Ended):
                break
            if isinstance(event, Printed):
                said += [event.text] if event.of_launcher else []
                show(event)
        self._close(f"rank {error.rank} has died")
        how = "".join(said).rstrip() or str(error)
        text = f"rank {error.rank} has died, and all ranks have ended; start them anew\n{how}"
        return RankFailedError(text, error.rank)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """See ``Ranks.close``."""
        self._close("close() was called")

    def _close(self, why: str) -> None:
        if self.closed_because is not None:
            return
        self.closed_because = why
        atexit.unregister(self.close)
        own = self._launcher is not None
        with suppress(DistError):
            self._left.set_result(own)
        if self._launcher is not None:
            self._launcher.close(_STOP_SECONDS)
        self._world.leave()
        self._news.close()


class _Call:
    """One call of some ranks, from its beginning to its results."""

    def __init__(
        self,
        link: _Link,
        number: int,
        tasks: Mapping[int, Task],
        seconds: float | None,
    ) -> None:
        self._link = link
        self._number = number
        self._seconds = seconds
        self._until = float("inf") if seconds is None else time.monotonic() + seconds
        self._calls: dict[int, Future[Reply]] = {}
        self._replies: dict[int, Reply] = {}
        self._stopped: set[int] = set()
        self._marks: set[Marked] = set()
        self._tasks = tasks

    def results(self) -> dict[int, Any]:
        """Run it; return its results by rank, or raise."""
        try:
            self._calls = self._link.start(self._tasks)
            self._wait()
            self._link.await_marks(list(self._replies), self._number, self._marks)
            error = self._error()
            if error is not None:
                raise error
        except WorkerLostError as lost:
            raise self._link.lose(lost) from lost
        except KeyboardInterrupt:
            self._stop(list(self._calls))
            raise
        finally:
            self._settle()
        replies = sorted(self._replies.items())
        return {rank: None if reply.value is None else unpack(reply.value) for rank, reply in replies}

    def _wait(self) -> None:
        """Wait until all have answered; interrupt those that another's failure leaves waiting."""
        while waiting := self._waiting():
            due = self._until
            failed = any(reply.description for reply in self._replies.values())
            if failed and not self._stopped:
                due = min(due, time.monotonic() + _OTHERS_SECONDS)
            event = self._next(due)
            if event is not None:
                continue
            if self._stopped or not failed:
                return
            self._stop(waiting)
            self._until = time.monotonic() + _STOP_SECONDS

    def _waiting(self) -> list[int]:
        return [rank for rank in self._calls if rank not in self._replies]

    def _next(self, until: float) -> object:
        event = self._link.next_event(until)
        match event:
            case Answered(rank) if rank in self._calls and self._calls[rank].done():
                self._replies[rank] = self._calls[rank].wait()
            case Marked(_, _, number) if number == self._number:
                self._marks.add(event)
            case _:
                pass
        return event

    def _stop(self, ranks: Sequence[int]) -> None:
        """Interrupt ``ranks``, and wait a while for them."""
        ranks = [rank for rank in ranks if rank not in self._replies]
        self._stopped.update(ranks)
        self._link.interrupt(ranks, self._number)
        until = time.monotonic() + _STOP_SECONDS
        while self._waiting() and self._next(until) is not None:
            pass
        self._link.await_marks(list(self._replies), self._number, self._marks)

    def _settle(self) -> None:
        """Note what the next call has to know."""
        late = {rank: self._calls[rank] for rank in self._waiting()}
        made_calls = any(reply.made_calls for reply in self._replies.values())
        self._link.call_failed(made_calls, late)

    def _error(self) -> Exception | None:
        """Return the error of the rank that failed first, or that the time is over."""
        failures: list[RankExit] = []
        for rank, reply in self._replies.items():
            if reply.description is not None:
                record = ErrorRecord.from_dict(reply.description)
                stopped = rank in self._stopped
                failures.append(RankExit(rank, rank, "", 0, 1, record.time, stopped, record))
        first = first_failure(failures)
        if first is None or first.error is None:
            waiting = self._waiting()
            if not waiting:
                return None
            where = self._link.stacks(dict.fromkeys(waiting))
            self._stop(waiting)
            return RpcTimeoutError(
                f"not done after {self._seconds:g} s: {rank_list(waiting)}\n{where}"
            )
        text = f"rank {first.rank} raised {first.error.summary()}\n\n{first.error.traceback}"
        error = RankError(text.rstrip(), first.rank)
        packed = self._replies[first.rank].error
        if packed is not None:
            with suppress(Exception):
                error.__cause__ = unpack(packed)
        return error
