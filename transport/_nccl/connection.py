"""One member's NCCL communicator: how it is connected, used and aborted.

Experimental, not run on a GPU (``docs/run/gpu.md``).

NCCL allows one thread at a time to use a communicator. Another thread may abort it at any moment,
and the abort frees its memory. So each use holds a lock, for which an abort waits. The abort waits
only briefly, because only the abort can end a call that blocks inside NCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from transport._calls.call import Call
from transport._communicators.runtime import Membership
from transport._communicators.store_waits import PeerKeys
from transport._cuda.device_state import DeviceStream, check_device_of_group
from transport._cuda.driver import Driver
from transport._cuda.watchdog import DeviceWatchdog
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
)
from transport._nccl.library import NcclComm, NcclLibrary
from transport._nccl.meeting import meet
from transport._waiting.interrupts import next_slice

_SLICE_SECONDS = 0.05
_IN_USE_SECONDS = 1.0


class NcclConnection:
    """A member's NCCL communicator and its stream, created by the first call.

    ``watchdog`` checks the deadlines of calls on the device, and NCCL's errors. A missed deadline
    or an error ends the connection.
    """

    def __init__(self, membership: Membership, library: NcclLibrary) -> None:
        self.library = library
        self._membership = membership
        self._lock = threading.Lock()
        self._comm: NcclComm | None = None
        self._stream: DeviceStream | None = None
        self._can_split = False
        self.abort_reason: str | None = None
        """Why the connection has ended, or None."""
        self._keys = PeerKeys(membership)
        self._in_use = threading.Lock()
        self.watchdog = DeviceWatchdog(
            f"meshlib-nccl-{membership.rank}", self._async_error, self.end
        )

    # Connecting.

    def connect(self, call: Call, driver: Driver, device: int) -> tuple[NcclComm, DeviceStream]:
        """Return the communicator and its stream. All members must make the first call.

        That call sets this member's device. Raises ValueError for another ``device`` later, and the
        errors of ``meet`` and ``_in_time``.
        """
        self.check_open(call)
        if self._comm is None or self._stream is None:
            self._join(call, driver, device)
        assert self._stream is not None
        check_device_of_group(self._stream, device)
        assert self._comm is not None
        return self._comm, self._stream

    def adopt(self, comm: NcclComm, stream: DeviceStream) -> None:
        """Use ``comm``, which has the same members, from now on."""
        with self._lock:
            self._comm, self._stream, self._can_split = comm, stream, True

    def _join(self, call: Call, driver: Driver, device: int) -> None:
        stream, member = DeviceStream(driver, device), self._membership
        try:
            name, can_split = meet(member, self._keys, self.library, driver, device, call)
            comm = self._in_time(
                lambda: self.library.join(member.size, member.rank, name), stream, call
            )
            assert comm is not None
        except CommunicatorAbortedError:
            self.watchdog.check_for(call)  # Raises the error that led to the abort.
            raise
        with self._lock:
            self._stream = stream
            if self.abort_reason is None:
                self._comm, self._can_split = comm, can_split
        if self._comm is None:
            comm.abort()
        self.check_open(call)

    def _in_time(
        self, enter: Callable[[], NcclComm | None], stream: DeviceStream, call: Call
    ) -> NcclComm | None:
        """Return ``enter()``, called in a separate thread, because NCCL waits without a deadline.

        Raises CommunicatorTimeoutError past the deadline of ``call``, CommunicatorAbortedError once
        the connection is aborted, DistBackendError for NCCL's own errors.
        """
        done = threading.Event()
        outcome: list[NcclComm | Exception | None] = []
        given_up = threading.Event()

        def body() -> None:
            try:
                with stream.driver.on(stream.device):
                    comm = enter()
                outcome.append(comm)
                if given_up.is_set() and comm is not None:
                    comm.abort()
            except Exception as error:  # noqa: BLE001 (the caller raises it)
                outcome.append(error)
            finally:
                done.set()

        threading.Thread(target=body, name="meshlib-nccl-join", daemon=True).start()
        try:
            while not done.wait(next_slice(min(_SLICE_SECONDS, call.deadline.remaining()))):
                if self.abort_reason is not None:
                    raise CommunicatorAbortedError(self.abort_reason)
                if call.deadline.expired:
                    raise CommunicatorTimeoutError(
                        f"{call.header}: NCCL did not connect all members within"
                        f" {call.deadline.seconds:g} s; NCCL_DEBUG=INFO logs what it tries",
                        None,
                    )
        finally:
            if not done.is_set():
                given_up.set()
        result = outcome[0]
        if isinstance(result, Exception):
            raise DistBackendError(
                f"NCCL could not connect the members: {result}; NCCL_DEBUG=INFO logs more"
            ) from result
        return result

    # Use.

    @property
    def can_split(self) -> bool:
        """True if the communicator exists, and all members' NCCL can split it."""
        return self._comm is not None and self._stream is not None and self._can_split

    @contextmanager
    def in_use(self, call: Call, stream: DeviceStream) -> Generator[None]:
        """Delay an abort while ``call`` is queued on ``stream``.

        Raises DistBackendError instead of NCCL's own errors.
        """
        try:
            with self._in_use, stream.driver.on(stream.device):
                self.check_open(call)
                yield
        except DistError:
            raise
        except self.library.errors as error:
            raise DistBackendError(
                f"NCCL failed in {call.header}: {error}; NCCL_DEBUG=WARN logs more"
            ) from error

    def split(self, call: Call, color: int, key: int) -> tuple[NcclComm, DeviceStream] | None:
        """Return the communicator of the members with the same ``color``, and a stream for it.

        All members must call it, and ``can_split`` must be true. Waits for running calls. Returns
        None for ``NO_COLOR``.
        """
        comm, stream = self._comm, self._stream
        assert comm is not None
        assert stream is not None
        if not self.watchdog.drain(call.deadline.remaining()):
            raise CommunicatorTimeoutError(
                f"{call.header}: earlier calls did not end within {call.deadline.seconds:g} s",
                None,
            )
        with self._in_use:
            self.check_open(call)
            part = self._in_time(lambda: comm.split(color, key), stream, call)
        return None if part is None else (part, DeviceStream(stream.driver, stream.device))

    # The end.

    def check_open(self, call: Call) -> None:
        """Raise the error that ended the connection, if any."""
        reason = self.abort_reason  # Read first: it is set after the watchdog's error.
        self.watchdog.check_for(call)
        if reason is not None:
            raise CommunicatorAbortedError(reason)

    def abort(self, reason: str) -> None:
        """End all work. Thread-safe; idempotent; never blocks."""
        with self._lock:
            first = self.abort_reason is None
            if first:
                self.abort_reason = reason
        self._keys.cancel(reason)
        if first:
            error = CommunicatorAbortedError(reason)
            # NCCL's own abort waits for its kernels to end.
            threading.Thread(
                target=self._give_up, args=(error,), name="meshlib-nccl-abort", daemon=True
            ).start()

    def end(self, error: DistError) -> None:
        """Abort NCCL's work. The other members' kernels then fail. May block."""
        with self._lock:
            if self.abort_reason is None:
                self.abort_reason = str(error)
            comm, self._comm = self._comm, None
        self._keys.cancel(str(error))
        if comm is not None:
            free = self._in_use.acquire(timeout=_IN_USE_SECONDS)
            try:
                # A failed communicator raises its error again.
                with suppress(*self.library.errors):
                    comm.abort()
            finally:
                if free:
                    self._in_use.release()

    def finish(self, seconds: float) -> None:
        """Wait until the running calls are done; abort them after ``seconds``."""
        if self._comm is not None and not self.watchdog.drain(seconds):
            reason = "the communicator was closed while calls were running on the device"
            self._give_up(CommunicatorAbortedError(reason))

    def close(self) -> None:
        """Destroy the communicator and its stream. No call may be running. Idempotent."""
        with self._lock:
            # The watchdog may abort it at the same time; only one thread may end it.
            comm, self._comm = self._comm, None
            if self.abort_reason is None:
                self.abort_reason = "the communicator was closed"
            stream, self._stream = self._stream, None
        self._keys.cancel("the communicator was closed")
        if comm is not None:
            with suppress(*self.library.errors):
                comm.destroy()
        self.watchdog.close()
        if stream is not None:
            stream.close()

    def _give_up(self, error: DistError) -> None:
        self.watchdog.fail(error)
        self.end(error)

    def _async_error(self) -> str | None:
        if not self._in_use.acquire(blocking=False):
            return None  # The watchdog polls again soon.
        try:
            comm = self._comm
            error = None if comm is None else comm.async_error()
        except self.library.errors as raised:
            error = str(raised)
        finally:
            self._in_use.release()
        return None if error is None else f"NCCL reports {error}; NCCL_DEBUG=WARN logs more"
