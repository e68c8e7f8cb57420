"""A rank that runs a notebook's tasks: the program ``python -m meshlib.notebook``."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import traceback
from contextlib import suppress
from queue import SimpleQueue

from meshlib._c10d.functions.objects import broadcast_object_list
from meshlib._job.current import current_world, find_world, install
from meshlib._job.starting.init import destroy_process_group, init_process_group
from meshlib._launcher.ranks.bootstrap import describe_error
from meshlib._recording.stacks import frames_of
from meshlib.notebook import _control
from meshlib.notebook._control import JOB, Reply, Task, turn_key
from meshlib.notebook._functions import (
    Packed,
    execute,
    new_main,
    pack,
    remember_cell,
    unpack,
)
from meshlib.notebook._output import mark
from transport import _environment as environment
from transport._errors import CollectiveMismatchError, DistError, StoreTimeoutError
from transport._net.secret_file import secret_from_environment
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore, underlying
from transport._waiting.interrupts import look, run_outside

_LOOK_SECONDS = 600.0


class _PendingTask:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.reply = Reply()
        self.ended = threading.Event()


class RankServer:
    """A server that runs a notebook's tasks in this rank's main thread, one after the other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_PendingTask | None] = SimpleQueue()
        self._namespace = new_main()
        self._lock = threading.Lock()
        self._running: int | None = None
        self._interrupted = 0
        """The last task that a notebook has cancelled."""

    def run(self, task: Task) -> Reply:
        """Run ``task`` after the earlier ones, and return its outcome."""
        job = _PendingTask(task)
        self._jobs.put(job)
        job.ended.wait()
        return job.reply

    def interrupt(self, number: int | None = None) -> None:
        """Raise KeyboardInterrupt in the task ``number`` (None: the running one).

        A task that has not begun is interrupted when it begins.
        """
        with self._lock:
            if number is not None:
                self._interrupted = number
            if self._running is not None and number in (None, self._running):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def stack(self) -> str:
        """Return the main thread's stack, without the frames of this file, as text."""
        frames = frames_of(threading.main_thread().ident or 0)
        ours = [i for i, (frame, _) in enumerate(frames) if frame.f_code is run_outside.__code__]
        below = frames[ours[-1] + 1 :] if ours else frames
        return "".join(traceback.StackSummary.extract(iter(below)).format())

    def end(self) -> None:
        """Let ``serve`` return after the tasks that have arrived."""
        self._jobs.put(None)

    def serve(self) -> None:
        """Run tasks until ``end``. Main thread only."""
        while (job := self._jobs.get()) is not None:
            try:
                job.reply = self._reply(job.task)
            finally:
                mark(job.task.number)
                job.ended.set()

    def _reply(self, task: Task) -> Reply:
        for name, lines in task.cells.items():
            remember_cell(name, lines)
        sys.path += [folder for folder in task.path if folder not in sys.path]
        before = _last_call()
        with self._lock:
            self._running = task.number
        try:
            if self._interrupted == task.number:
                raise KeyboardInterrupt
            if task.what is None:
                _join_anew()
                return Reply()
            function, args = unpack(task.what, self._namespace)
            value = run_outside(function, *args)
            return Reply(_pack_result(value, function))
        except BaseException as error:  # noqa: BLE001 (the notebook raises it)
            self._end_task()
            _drop_own_frames(error)
            packed: Packed | None = None
            with suppress(Exception):
                packed = pack(error)
                unpack(packed)
            rank = int(os.environ[environment.RANK])
            made_calls = _last_call() is not before
            return Reply(None, describe_error(error, rank, __file__), packed, made_calls)
        finally:
            self._end_task()

    def _end_task(self) -> None:
        """Consume interrupts of the finished task, so that later code does not receive them."""
        with self._lock:
            self._running = None
        with suppress(KeyboardInterrupt):
            look()


def _pack_result(value: object, function: object) -> Packed:
    try:
        return pack(value)
    except Exception as error:  # noqa: BLE001 (a class's own pickling may raise anything)
        name, kind = getattr(function, "__qualname__", repr(function)), type(value).__name__
        raise TypeError(f"the result of {name}, a {kind}, cannot be sent: {error}") from None


def _drop_own_frames(error: BaseException) -> None:
    """Let the traceback of ``error`` begin in the user's function, if the error is from there."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not run_outside.__code__:
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code in (run_outside.__code__, execute.__code__):
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__


def _last_call() -> object:
    """Return the record of this rank's last call of a group."""
    world = find_world()
    records = [] if world is None else world.recorder.records()
    return records[-1] if records else None


def _join_anew() -> None:
    """Leave the groups, even during calls, and join the job again."""
    world = find_world()
    if world is not None:
        install(None, thread_only=False)
        with suppress(CollectiveMismatchError):  # the last call has already raised it
            world.close(drain=0.0, linger=0.0)
    init_process_group()


# ------------------------------------------------------------------ one notebook after the other


def _meet_notebooks(server: RankServer, store: Store, rank: int, ranks: int) -> None:
    """Serve one notebook after the other, until one of them ends the ranks."""
    secret = secret_from_environment()
    turn = 0
    while True:
        turn += 1
        try:
            _wait_for(store, turn_key(turn))
        except DistError:  # the job ends
            return
        try:
            place = PrefixStore(turn_key(turn), store.clone())
            world = _control.join(place, rank, ranks, secret, server)
        except DistError:
            continue  # the notebook, or another rank, has left
        ends = False
        with contextlib.closing(_NotebookService(world, server)), suppress(DistError):
            ends = world.call(ranks, _control.closed).wait()
        if ends:
            server.end()
            return


class _NotebookService:
    """The end of a notebook's World and of its running task on this rank."""

    def __init__(self, world: _control.ControlWorld, server: RankServer) -> None:
        self._world, self._server = world, server

    def close(self) -> None:
        self._server.interrupt()
        self._world.leave()


def _wait_for(store: Store, key: str) -> None:
    while True:
        with suppress(StoreTimeoutError):
            store.wait([key], timeout=_LOOK_SECONDS)
            return


def main() -> None:
    """Serve notebooks as a rank of the environment's job, until a notebook ends the ranks."""
    server = RankServer()
    init_process_group()
    world = current_world()
    name = [secrets.token_hex(8)]
    broadcast_object_list(name, src=0)
    store = underlying(world.store).clone()
    if world.rank == 0:
        about = {"name": name[0], "ranks": world.size, "mesh": os.environ.get(environment.MESH)}
        store.set(JOB, json.dumps(about))
    place = PrefixStore(f"notebook/{name[0]}", store)
    arguments = (server, place, world.rank, world.size)
    threading.Thread(
        target=_meet_notebooks, args=arguments, name="meshlib-notebooks", daemon=True
    ).start()
    mark(0)
    server.serve()
    if find_world() is not None:
        destroy_process_group()
