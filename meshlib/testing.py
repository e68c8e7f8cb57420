"""``run_ranks``: a job whose ranks are threads of this process, for tests and for trying out."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from glob import glob
from typing import Any, TypeVar

from meshlib.groups.backend import parse_backend
from meshlib.job.current import install
from meshlib.job.thread_rank import ThreadRank, set_thread_rank
from meshlib.job.world import World
from transport.checks import to_whole_number
from transport.communicators import backends
from transport.communicators.runtime import Runtime
from transport.deadline import Deadline, Timeout, to_seconds
from transport.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
)
from transport.store.hash_store import HashStore

T = TypeVar("T")
DEFAULT_RUN_TIMEOUT = 60.0
# How long threads that were told to stop may take to do so.
GRACE_SECONDS = 5.0
# What XLA takes for the number of cores when it starts; and threads for the ranks of most tests.
_XLA_THREADS, _ENOUGH_THREADS = "NPROC", 16


class RankError(DistError):
    """A rank's function raised; the exception is this one's ``__cause__``, ``rank`` its rank."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    backend: str = "inproc",
    timeout: Timeout = DEFAULT_RUN_TIMEOUT,
    call_timeout: Timeout | None = None,
) -> list[T]:
    """Call ``fn(*args)`` as each of ``world_size`` ranks, each a thread, and return the results.

    The default group is there when ``fn`` begins: it uses ``meshlib.get_rank()`` and the rest. A
    program with ``init_process_group()`` of its own does as in a process: it makes its own default
    group in place of that one (over ``backend``, if it names none) and may end it and make another.
    What it reads in ``os.environ`` itself is the process's, not the rank's.

    ``timeout`` (seconds) bounds the whole run; ``call_timeout`` is the default deadline of the
    calls inside (``timeout`` if None). Any backend will do: over ``tcp`` the threads talk through
    real sockets. If ``fn`` uses JAX, import it before this is called, and let its first use be
    inside, or set ``NPROC`` to at least ``world_size`` before that: all ranks share XLA's threads.

    Raises ``RankError`` for the rank that failed first, with its exception as the cause: a rank
    that failed because another one did is never named. Raises ``CollectiveTimeoutError`` when the
    time is over, naming the ranks that were not done; ValueError and TypeError for arguments.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    if to_whole_number(world_size, "world_size") < 1:
        raise ValueError(f"world_size is {world_size}; expected at least 1")
    run = _Run(fn, args, world_size, backend, to_seconds(timeout), call_timeout)
    with _threads_for_xla(world_size):
        return run.results()


def _own_traces() -> AbstractContextManager[object]:
    """Keep this thread's traces by ``jax.jit`` from other threads.

    A trace contains the rank and its groups; JAX keeps one for all threads that call a function,
    unless this, the metadata that XLA's operations get, differs.
    """
    if "jax" not in sys.modules:
        return nullcontext()
    from jax.experimental.xla_metadata import set_xla_metadata

    return set_xla_metadata(meshlib_rank=secrets.token_hex(8))


@contextmanager
def _threads_for_xla(size: int) -> Generator[None]:
    """Have XLA start with more threads than ``size`` ranks, if it starts meanwhile.

    It has as many as there are cores, for all ranks; and in some programs (those of
    ``parallel.jax.DistributedDataParallel``) one that waits for the others holds one.
    """
    if "jax" not in sys.modules or _XLA_THREADS in os.environ:
        yield
        return
    cores = len(os.sched_getaffinity(0))
    os.environ[_XLA_THREADS] = str(max(cores, 2 * size, _ENOUGH_THREADS))
    try:
        yield
    finally:
        os.environ.pop(_XLA_THREADS, None)


def _too_few_threads(size: int) -> str:
    """Return what is to be said if XLA has fewer threads than ``size`` ranks may hold."""
    count = 0
    for name in glob("/proc/self/task/*/comm"):
        with suppress(OSError), open(name, encoding="utf-8") as file:  # the thread may end
            count += file.read().strip() == "tf_XLAEigen"
    if not 0 < count < size:
        return ""
    return (
        f"; {size} ranks share the {count} threads that XLA began with, and may wait for each other"
        f" for ever: use JAX inside of run_ranks first, or set {_XLA_THREADS} to at least {size}"
        " before it is used"
    )


class _Run:
    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        size: int,
        backend: str,
        timeout: float,
        call_timeout: Timeout | None,
    ) -> None:
        self._fn = fn
        self._args = args
        self._size = size
        self._backends = parse_backend(backend)
        for name in set(self._backends.values()):
            # Imported here, not by all ranks at once.
            backends.lookup(name).load()
        store = HashStore()
        self._timeout = timeout
        self._call_timeout = (
            timeout if call_timeout is None else to_seconds(call_timeout, "call_timeout")
        )
        self._results: list[Any] = [None] * size
        self._failures: list[tuple[int, BaseException]] = []
        self._ranks = [
            ThreadRank(store.clone(), rank, size, backend, self._call_timeout)
            for rank in range(size)
        ]
        self._lock = threading.Lock()

    def results(self) -> list[Any]:
        threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self._size)
        ]
        for thread in threads:
            thread.start()
        deadline = Deadline.after(self._timeout)
        for thread in threads:
            thread.join(deadline.remaining())
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            self._stop(late)
            grace = Deadline.after(GRACE_SECONDS)
            for thread in threads:
                thread.join(grace.remaining())
        self._raise_failure(late)
        return self._results

    def _rank(self, rank: int) -> None:
        mine = self._ranks[rank]
        set_thread_rank(mine)
        how = "has ended without coming"
        try:
            world = World(
                *mine.join(),
                runtime=Runtime(),
                backends=self._backends,
                timeout=self._call_timeout,
            )
            install(world, thread_only=True)
            mine.provided = True
            with _own_traces():
                self._results[rank] = self._fn(*self._args)
        except BaseException as error:  # noqa: BLE001 (re-raised by the caller's thread)
            with self._lock:
                self._failures.append((rank, error))
            how = f"raised {type(error).__name__}: {error}"
            if mine.world is not None:
                mine.world.announce_exit(how)
        finally:
            mine.end(how)
            world = mine.world
            install(None, thread_only=True)
            set_thread_rank(None)
            if world is not None:
                try:
                    world.close(drain=0.0 if self._failures else GRACE_SECONDS, linger=0.0)
                except CollectiveMismatchError as error:
                    with self._lock:
                        self._failures.append((rank, error))

    def _stop(self, late: list[int]) -> None:
        why = f"the run ended: {self._timeout:g} s are over{_too_few_threads(self._size)}"
        for rank in late:
            world = self._ranks[rank].world
            if world is not None:
                for group in world.groups():
                    group.fail(DistBackendError(why))

    def _raise_failure(self, late: list[int]) -> None:
        with self._lock:
            failures = list(self._failures)
        # What a rank raises because another one failed says nothing about the cause.
        primary = [f for f in failures if not isinstance(f[1], DistError)] or failures
        if late and primary is failures:
            raise CollectiveTimeoutError(
                f"ranks {late} of {self._size} were not done after {self._timeout:g} s"
                f"{_too_few_threads(self._size)}"
            ) from (primary[0][1] if primary else None)
        if primary:
            rank, error = primary[0]
            raise RankError(
                f"rank {rank} of {self._size} raised {type(error).__name__}: {error}", rank
            ) from error
