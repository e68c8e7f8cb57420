"""Comparison of the members' calls on the host, while the calls run.

Experimental, not run on a GPU (``docs/run/gpu.md``).

NCCL does not compare calls: mismatched members hang, or write to wrong addresses. Here each member
posts the header of every call that it makes. A thread exchanges the posted headers over a separate
CPU communicator. Calls do not wait for this, so a member may be many calls ahead. A mismatch is
detected once the last member has made the call.

A round is one all-gather of the headers posted since the last round. A member with uncompared
headers starts or joins a round. A member without any does not join yet, and the other members wait
for it. So every completed round compares at least one call, and no round starts without a call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import HEADER_BYTES, NO_ROOT, CallHeader, Kind
from transport._communicators.base import Communicator
from transport._cuda.completion import Completion
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistError,
    HeaderMismatchError,
)
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition

_BATCH = 16
_BLOCK_BYTES = 8 + _BATCH * HEADER_BYTES
_BYTE = dtype_code(np.dtype(np.uint8))
_IDLE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class PostedCall:
    """A posted call. It sends ``sends[i]`` bytes to member i and expects ``expects[i]`` from it."""

    call: Call
    sends: Sequence[int]
    expects: Sequence[int]
    completion: Completion | None = None
    """The call's completion on the device, once it exists."""
    compared: bool = False
    """True if all members have made this call, with equal headers."""


OnMismatch = Callable[[PostedCall, DistError], None]


class CallComparer:
    """One member's end of the comparison.

    ``channel`` has the same members and belongs to this object. ``on_mismatch(entry, error)`` is
    called at most once, in this object's thread. The error is a ``HeaderMismatchError`` if members
    made different calls. It is another DistError if a member is lost or has not made the call by
    its deadline. The thread exists only while calls are uncompared.
    """

    def __init__(self, channel: Communicator, on_mismatch: OnMismatch) -> None:
        self._channel = channel
        self._on_mismatch = on_mismatch
        self._changed = Condition()
        self._open: deque[PostedCall] = deque()
        self._sent = 0
        self._headers: list[deque[bytes]] = [deque() for _ in range(channel.size)]
        self._rounds = 0
        self._thread: threading.Thread | None = None
        self._ended = False

    def post(
        self, call: Call, sends: Sequence[int] = (), expects: Sequence[int] = ()
    ) -> PostedCall:
        """Post ``call`` for comparison with the other members' calls, in order.

        For kinds whose header has no sizes, all members pass ``sends`` and ``expects``.
        """
        entry = PostedCall(call, sends, expects)
        if self._channel.size == 1:
            entry.compared = True
            return entry
        with self._changed:
            if self._ended:
                return entry
            self._open.append(entry)
            if self._thread is None:
                name = f"meshlib-nccl-comparer-{self._channel.rank}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._thread = thread
            else:
                self._changed.notify_all()
        return entry

    def drain(self, seconds: float) -> bool:
        """Wait until all posted calls are compared; return False after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open or self._ended, seconds)

    def abort(self, reason: str) -> None:
        """Stop comparing. Thread-safe; idempotent; never blocks."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._channel.abort(reason)

    def close(self) -> None:
        """End the thread and close the channel. Idempotent."""
        with self._changed:
            busy, self._ended = bool(self._open), True
            thread = self._thread
            self._changed.notify_all()
        if busy:
            self._channel.abort("the communicator was closed")
        if thread is not None and thread is not threading.current_thread():
            thread.join(_IDLE_SECONDS)
        self._channel.close()

    # The implementation.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._ended, _IDLE_SECONDS)
                if self._ended or not self._open:
                    self._thread = None
                    return
                oldest = self._open[0]
                fresh = [entry.call.packed for entry in list(self._open)[self._sent :][:_BATCH]]
                self._sent += len(fresh)
            current = oldest
            try:
                self._exchange(fresh, oldest.call.deadline)
                while all(self._headers):
                    current = self._open[0]
                    self._compare(current, [peer.popleft() for peer in self._headers])
                    with self._changed:
                        current.compared = True
                        self._open.popleft()
                        self._sent -= 1
                        self._changed.notify_all()
            except DistError as error:
                with self._changed:
                    aborted = self._ended
                    self._ended = True
                    self._thread = None
                    self._changed.notify_all()
                if not (aborted and isinstance(error, CommunicatorAbortedError)):
                    self._on_mismatch(current, _for_call(current.call, error))
                return

    def _exchange(self, fresh: Sequence[bytes], deadline: Deadline) -> None:
        """Exchange newly posted headers; append each member's headers to ``_headers``."""
        text = len(fresh).to_bytes(8, "little") + b"".join(fresh)
        own = np.frombuffer(text.ljust(_BLOCK_BYTES, b"\0"), np.uint8)
        for headers, block in zip(self._headers, self._all_gather(own, deadline), strict=True):
            data = block.tobytes()
            for i in range(int.from_bytes(data[:8], "little")):
                start = 8 + i * HEADER_BYTES
                headers.append(data[start : start + HEADER_BYTES])

    def _compare(self, entry: PostedCall, headers: list[bytes]) -> None:
        own, membership = entry.call.header, self._channel.membership
        for peer, packed in enumerate(headers):
            if packed != entry.call.packed:
                header = CallHeader.unpack(packed)
                text = f"{membership.describe(peer)} made {header}, this rank {own}"
                raise HeaderMismatchError(text, peer, own, header)
        if entry.sends:
            self._compare_sizes(entry)

    def _compare_sizes(self, entry: PostedCall) -> None:
        """Compare the sizes of all pairs, so that all members raise the same error."""
        own = np.array([entry.sends, entry.expects], np.int64)
        rows = self._all_gather(own.reshape(-1).view(np.uint8), entry.call.deadline)
        table = np.stack([row.view(np.int64).reshape(own.shape) for row in rows])
        sent, expected = table[:, 0], table[:, 1].T
        wrong = np.argwhere(sent != expected)
        if not wrong.size:
            return
        source, into = map(int, wrong[0])
        membership, header = self._channel.membership, entry.call.header
        raise HeaderMismatchError(
            f"{membership.describe(source)} has {sent[source, into]} bytes for"
            f" {membership.describe(into)}, which expects {expected[source, into]}, in {header}",
            source if source != self._channel.rank else into,
            header,
            header,
        )

    def _all_gather(
        self, own: np.ndarray[tuple[int], np.dtype[np.uint8]], deadline: Deadline
    ) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        self._rounds += 1
        elements = own.size * self._channel.size
        header = CallHeader(self._rounds, elements, NO_ROOT, Kind.ALL_GATHER, _BYTE, 0)
        rows = [np.empty(own.size, np.uint8) for _ in range(self._channel.size)]
        self._channel.all_gather(Call(header, deadline), rows, own)
        return rows


def _for_call(call: Call, error: DistError) -> DistError:
    """Return ``error`` as an error of ``call``, not of the comparison."""
    if isinstance(error, CommunicatorTimeoutError):
        # The awaited peer may itself be blocked.
        text = f"{call.header}: not all members made the call within {call.deadline.seconds:g} s"
        return CommunicatorTimeoutError(text, error.peer)
    return error
