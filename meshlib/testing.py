"""``run_ranks``: a job whose ranks are threads of this process, for tests and experiments."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from meshlib._groups.backend import FAKE, is_fake, parse_backend
from meshlib._job.current import install
from meshlib._job.thread_rank import ThreadRank, set_thread_rank
from meshlib._job.world import World
from meshlib._launcher.ranks.failure import Blame, RaisedError, first_failure
from transport._checks import to_whole_number
from transport._communicators import backends
from transport._communicators.runtime import Runtime
from transport._errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
)
from transport._platform import available_cores, thread_names
from transport._store.hash_store import HashStore
from transport._waiting.deadline import Deadline, Timeout, to_seconds

T = TypeVar("T")
DEFAULT_RUN_TIMEOUT = 60.0
# Threads may take this long to stop.
GRACE_SECONDS = 5.0
# The variable that sets the threads of an XLA client, and a number that is enough for most tests.
_XLA_THREADS, _ENOUGH_THREADS = "NPROC", 16


class RankError(DistError):
    """Raised if the function of ``rank`` raised; its exception is the ``__cause__``."""

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

    The default group exists when ``fn`` begins. As in a process, ``fn`` may call
    ``init_process_group()``, which replaces the default group, over ``backend`` if it names none.
    All ranks share the process's ``os.environ``.

    ``timeout`` (seconds) limits the whole run; ``call_timeout`` is the default deadline of the
    calls inside (``timeout`` if None). Any backend works: over ``tcp`` the threads communicate
    through real sockets. If ``fn`` uses JAX, import JAX before this call. If JAX has started with
    too few threads for the ranks, each rank's default device (``jax.default_device``) is a CPU
    device of another XLA client.

    Raises ``RankError`` for the rank that failed first, with its exception as the cause.
    Raises ``CollectiveTimeoutError`` with the unfinished ranks after ``timeout``, and ValueError
    and TypeError for wrong arguments.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    if to_whole_number(world_size, "world_size") < 1:
        raise ValueError(f"world_size is {world_size}; expected at least 1")
    run = _ThreadJob(fn, args, world_size, backend, to_seconds(timeout), call_timeout)
    with _threads_of_xla.for_ranks(world_size) as device:
        return run.results(device)


@contextmanager
def _jax_of_a_rank(device: Any) -> Generator[None]:
    """Let JAX compute on ``device`` (None: JAX's choice), with separate traces for this thread.

    A trace by ``jax.jit`` contains the rank and its groups. JAX shares a function's trace among
    threads, unless the metadata of XLA's operations differs.
    """
    if "jax" not in sys.modules:
        yield
        return
    import jax
    from jax.experimental.xla_metadata import set_xla_metadata

    on_device = nullcontext() if device is None else jax.default_device(device)
    with on_device, set_xla_metadata(meshlib_rank=secrets.token_hex(8)):
        yield


class _ThreadsOfXla:
    """XLA clients with more threads than ranks.

    An XLA client starts with a thread for each core. A waiting rank holds one of its threads, in
    programs of ``parallel.jax.DistributedDataParallel`` two.
    """

    def __init__(self) -> None:
        self._own = 0  # threads of the client that JAX started inside run_ranks
        self._others: dict[int, Any] = {}  # clients of this object, by number of threads

    @contextmanager
    def for_ranks(self, size: int) -> Generator[Any]:
        """Yield the device for the ranks' programs; None: JAX's choice has enough threads.

        If JAX starts in the block, it starts with enough threads. If it has started with fewer,
        the device belongs to another client, and JAX copies arrays to it.
        """
        needed = max(2 * size, _ENOUGH_THREADS)
        if "jax" not in sys.modules:
            yield None
        elif not _count_threads():
            with _started_with(needed) as threads:
                try:
                    yield None
                finally:
                    self._own = threads if _count_threads() else 0
        else:
            yield None if self._has_enough(2 * size) else self._device(needed)

    def _has_enough(self, needed: int) -> bool:
        given = _given_threads() or available_cores()
        return max(self._own, min(given, _count_threads())) >= needed

    def _device(self, needed: int) -> Any:
        from jax.extend.backend import get_default_device
        from jaxlib import xla_client

        default: Any = get_default_device()
        if default.platform != "cpu":
            return None
        if needed not in self._others:
            with _started_with(needed):
                self._others[needed] = xla_client.make_cpu_client(
                    num_devices=default.client.local_device_count()
                )
        devices = self._others[needed].local_devices()
        return next(device for device in devices if device.id == default.id)


_threads_of_xla = _ThreadsOfXla()


def _given_threads() -> int:
    """Return the number of threads that the user has set for XLA clients; 0: not set."""
    given = os.environ.get(_XLA_THREADS, "")
    return int(given) if given.isdecimal() else 0


@contextmanager
def _started_with(threads: int) -> Generator[int]:
    """Start XLA clients of the block with at least ``threads`` threads; yield their number."""
    given = os.environ.get(_XLA_THREADS)
    threads = max(_given_threads(), available_cores(), threads)
    os.environ[_XLA_THREADS] = str(threads)
    try:
        yield threads
    finally:
        if given is None:
            os.environ.pop(_XLA_THREADS, None)
        else:
            os.environ[_XLA_THREADS] = given


def _count_threads() -> int:
    """Return a lower bound of the number of threads of this process's XLA clients."""
    return (thread_names() or []).count("tf_XLAEigen")


class _ThreadJob:
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
        if is_fake(self._backends):
            raise ValueError(
                f"backend is {backend!r}, which has no other ranks; expected another backend,"
                f" or init_process_group(backend={FAKE!r}) in place of run_ranks"
            )
        for name in set(self._backends.values()):
            # Imported here, not by all ranks at once.
            backends.lookup(name).load()
        store = HashStore()
        self._timeout = timeout
        self._call_timeout = (
            timeout if call_timeout is None else to_seconds(call_timeout, "call_timeout")
        )
        self._results: list[Any] = [None] * size
        self._failures: list[RaisedError] = []
        self._ranks = [
            ThreadRank(store.clone(), rank, size, backend, self._call_timeout)
            for rank in range(size)
        ]
        self._lock = threading.Lock()

    def results(self, device: Any) -> list[Any]:
        for mine in self._ranks:
            mine.jax_device = device
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
        how = "has ended without joining"
        try:
            world = World(
                *mine.join(),
                runtime=Runtime(),
                backends=self._backends,
                timeout=self._call_timeout,
            ).join()
            install(world, thread_only=True)
            mine.provided = True
            with _jax_of_a_rank(mine.jax_device):
                self._results[rank] = self._fn(*self._args)
        except BaseException as error:  # noqa: BLE001 (re-raised by the caller's thread)
            with self._lock:
                self._failures.append(RaisedError(rank, error))
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
                        self._failures.append(RaisedError(rank, error))

    def _stop(self, late: list[int]) -> None:
        why = f"the run ended after its timeout of {self._timeout:g} s"
        for rank in late:
            world = self._ranks[rank].world
            if world is not None:
                for queue in world.registry.queues():
                    queue.failure.fail(DistBackendError(why))

    def _raise_failure(self, late: list[int]) -> None:
        with self._lock:
            first = first_failure(self._failures)
        if late and (first is None or first.blame is not Blame.OWN):
            raise CollectiveTimeoutError(
                f"ranks {late} of {self._size} were not finished after {self._timeout:g} s"
            ) from (None if first is None else first.error)
        if first is not None:
            rank, error = first.rank, first.error
            raise RankError(
                f"rank {rank} of {self._size} raised {type(error).__name__}: {error}", rank
            ) from error
