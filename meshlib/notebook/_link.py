"""A notebook's link to its ranks: choosing ranks, calling them, closing the link."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

from meshlib._calls.future import Future
from meshlib._launcher.ranks.failure import rank_list
from meshlib._mesh.config import MeshConfig
from meshlib.notebook import _control
from meshlib.notebook._call import STOP_SECONDS, RankCall
from meshlib.notebook._control import ControlWorld, Reply, Task, turn_key
from meshlib.notebook._functions import cells, pack
from meshlib.notebook._local import LocalLauncher
from meshlib.notebook._output import Answered, EventQueue, LauncherEnded, Marked, Printed, show
from meshlib.rpc import WorkerLostError
from transport._checks import to_whole_number
from transport._errors import DistError, DistStoreError, RankFailedError
from transport._store.prefix_store import PrefixStore

_LOSS_SECONDS = 5.0
_JOIN_ANEW_SECONDS = 60.0


class NotebookLink:
    """A notebook's link to its ranks, for one call at a time."""

    def __init__(
        self, size: int, mesh: str | None, events: EventQueue, launcher: LocalLauncher | None
    ) -> None:
        self.closed_because: str | None = None
        self._size = size
        self._mesh = None if mesh is None else MeshConfig.parse(mesh).mesh_for(size)
        self._events = events
        self._launcher = launcher
        self._left: Future[bool] = Future()
        self._world: ControlWorld
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._cell_numbers = count(1)
        self._cells_sent: list[set[str]] = [set() for _ in range(size)]
        self._late: dict[int, Future[Reply]] = {}
        """The calls that an interrupt did not end, by rank."""
        self._join_anew = False

    def join(self, store: PrefixStore, secret: bytes | None) -> None:
        """Connect to the ranks in ``store``. Raises ``DistStoreError`` if they do not respond."""
        turn = store.add("turns", 1)
        store.set(turn_key(turn), b"1")
        place = PrefixStore(turn_key(turn), store)
        try:
            self._world = _control.join(place, self._size, self._size, secret, self)
        except DistStoreError as error:
            raise DistStoreError(
                f"the ranks do not respond; perhaps another notebook is attached: {error}"
            ) from error
        atexit.register(self.close)

    def closed(self) -> Future[bool]:
        """See ``Notebook``."""
        return self._left

    def described(self) -> str:
        """Return the ranks' mesh, and "closed" after ``close``, as text."""
        mesh = "no mesh" if self._mesh is None else f"mesh {self._mesh.described()}"
        return f"{mesh}{', closed' if self.closed_because else ''}"

    def next_cell_name(self) -> str:
        """Return the file name, in tracebacks, of the next cell that is sent as text."""
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
            raise ValueError("no ranks; expected at least one")
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
                    f"{item.strip()!r} is not a coordinate of the mesh {self._mesh.described()};"
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
            return RankCall(self, number, tasks, seconds).results()

    @contextmanager
    def _one_at_a_time(self) -> Generator[None]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another call on these ranks is running; expected one at a time")
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
                f" Wait for it, or close() these ranks and start new ones.\n{where}"
            )

    def start(self, tasks: Mapping[int, Task], calls: dict[int, Future[Reply]]) -> None:
        """Begin ``tasks``, by rank, and put them into ``calls``; ``Answered`` follows for each."""
        for rank, task in tasks.items():
            call = calls[rank] = self._world.call(rank, _control.run, task)
            call.add_done_callback(partial(self._answered, rank))

    def _answered(self, rank: int, _: object) -> None:
        self._events.put(Answered(rank))

    def interrupt(self, ranks: Sequence[int], number: int) -> None:
        """Interrupt the task ``number`` on ``ranks``."""
        for rank in ranks:
            with suppress(DistError):
                self._world.call(rank, _control.interrupt, number, seconds=STOP_SECONDS)

    def stacks(self, ranks: Mapping[int, object]) -> str:
        """Return the stacks of ``ranks`` as text."""
        lines: list[str] = []
        for rank in sorted(ranks):
            try:
                at = self._world.call(rank, _control.stack, seconds=STOP_SECONDS).wait()
            except DistError as error:
                at = f"  {error}\n"
            lines.append(f"rank {rank} is at\n{at or '  its start or end'}")
        return "".join(lines)

    def next_event(self, until: float) -> object:
        """Show printed lines; return the next other event, or None at the time ``until``."""
        while True:
            event = self._events.next(until)
            if not isinstance(event, Printed):
                return event
            show(event)

    def marks(self, ranks: Sequence[int], number: int) -> set[Marked]:
        """Return the marks that end the output of ``ranks`` in task ``number``."""
        if self._launcher is None:
            return set()
        return {Marked(stream, rank, number) for stream in (1, 2) for rank in ranks}

    def call_failed(self, made_calls: bool, late: Mapping[int, Future[Reply]]) -> None:
        """Record the effects of a failed call: unfinished ranks, and groups out of step."""
        self._late.update(late)
        self._join_anew = self._join_anew or made_calls or bool(late)

    def _make_groups_anew(self) -> None:
        number = next(self._numbers)
        tasks = {rank: Task(number, None) for rank in range(self._size)}
        RankCall(self, number, tasks, _JOIN_ANEW_SECONDS).results()
        self._join_anew = False

    def lose(self, error: WorkerLostError) -> RankFailedError:
        """Close the link after the loss of a rank; return the error to raise."""
        printed: list[str] = []
        until = time.monotonic() + _LOSS_SECONDS
        while self._launcher is not None:
            event = self._events.next(until)
            if event is None or isinstance(event, LauncherEnded):
                break
            if isinstance(event, Printed):
                printed += [event.text] if event.of_launcher else []
                show(event)
        self._close(f"rank {error.rank} has died")
        how = "".join(printed).rstrip() or str(error)
        text = f"rank {error.rank} has died, and all ranks have ended; start new ones\n{how}"
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
            self._launcher.close(STOP_SECONDS)
        self._world.leave()
        self._events.close()
