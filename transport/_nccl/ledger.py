"""Whether all members make the same calls: compared on the host, behind the calls.

Experimental, not run on a GPU (``docs/gpu.md``).

NCCL compares nothing: members that disagree hang, or write where they should not. Here each member
posts the header of each call as it makes it, and a thread exchanges what was posted, by a
communicator for the CPU of its own. Nobody waits for that: calls go on to the device, and a
member may be many calls ahead. A dispute comes out once the last member has made the call.

A round is one all-gather of what each has posted since the last one. Whoever has posted something
that not all have answered begins or joins a round; a member with nothing open stays out, and the
others wait for it in the round. So every round that ends compares at least one call, and no rounds
are made while nobody calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from transport._call import HEADER_BYTES, NO_ROOT, Call, CallHeader, Kind, dtype_code
from transport._communicators.base import Communicator
from transport._cuda.flat import Completion
from transport._deadline import Deadline
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistError,
    HeaderMismatchError,
)
from transport._interrupts import Condition

_BATCH = 16
_BLOCK_BYTES = 8 + _BATCH * HEADER_BYTES
_BYTE = dtype_code(np.dtype(np.uint8))
_IDLE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Entry:
    """One posted call. ``gives[i]`` bytes go to member i, ``wants[i]`` are expected from it."""

    call: Call
    gives: Sequence[int]
    wants: Sequence[int]
    completion: Completion | None = None
    """The end of the call on the device, once it is there."""
    compared: bool = False
    """Whether all members have made this call, and it was the same one."""


Dispute = Callable[[Entry, DistError], None]


class Ledger:
    """One member's side of the comparison.

    ``channel`` has the same members and belongs to the ledger. ``on_dispute(entry, error)`` is
    called once, in the ledger's thread: ``HeaderMismatchError`` when members disagree in a call,
    another DistError when one of them has not made it by its deadline, or is gone. The thread
    lives while there is something to compare.
    """

    def __init__(self, channel: Communicator, on_dispute: Dispute) -> None:
        self._channel = channel
        self._on_dispute = on_dispute
        self._changed = Condition()
        self._open: deque[Entry] = deque()
        self._sent = 0
        self._theirs: list[deque[bytes]] = [deque() for _ in range(channel.size)]
        self._rounds = 0
        self._thread: threading.Thread | None = None
        self._ended = False

    def post(self, call: Call, gives: Sequence[int] = (), wants: Sequence[int] = ()) -> Entry:
        """Have ``call`` compared with what the other members call in its place.

        ``gives`` and ``wants`` are for kinds whose sizes are not in the header; all members
        give them for these kinds.
        """
        entry = Entry(call, gives, wants)
        if self._channel.size == 1:
            entry.compared = True
            return entry
        with self._changed:
            if self._ended:
                return entry
            self._open.append(entry)
            if self._thread is None:
                name = f"meshlib-nccl-ledger-{self._channel.rank}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._thread = thread
            else:
                self._changed.notify_all()
        return entry

    def drain(self, seconds: float) -> bool:
        """Wait until all that was posted is compared; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open or self._ended, seconds)

    def abort(self, reason: str) -> None:
        """Compare nothing any more. Any thread; idempotent; never blocks."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._channel.abort(reason)

    def close(self) -> None:
        """End the thread and the channel. Idempotent."""
        with self._changed:
            busy, self._ended = bool(self._open), True
            thread = self._thread
            self._changed.notify_all()
        if busy:
            self._channel.abort("the communicator was closed")
        if thread is not None and thread is not threading.current_thread():
            thread.join(_IDLE_SECONDS)
        self._channel.close()

    # How it is done.

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
                while all(self._theirs):
                    current = self._open[0]
                    self._compare(current, [peer.popleft() for peer in self._theirs])
                    with self._changed:
                        current.compared = True
                        self._open.popleft()
                        self._sent -= 1
                        self._changed.notify_all()
            except DistError as error:
                with self._changed:
                    given_up = self._ended
                    self._ended = True
                    self._thread = None
                    self._changed.notify_all()
                if not (given_up and isinstance(error, CommunicatorAbortedError)):
                    self._on_dispute(current, _in_terms_of(current.call, error))
                return

    def _exchange(self, fresh: Sequence[bytes], deadline: Deadline) -> None:
        """Bring the members' newly posted headers into ``_theirs``, this one's as well."""
        text = len(fresh).to_bytes(8, "little") + b"".join(fresh)
        mine = np.frombuffer(text.ljust(_BLOCK_BYTES, b"\0"), np.uint8)
        for theirs, block in zip(self._theirs, self._all_gather(mine, deadline), strict=True):
            data = block.tobytes()
            for i in range(int.from_bytes(data[:8], "little")):
                start = 8 + i * HEADER_BYTES
                theirs.append(data[start : start + HEADER_BYTES])

    def _compare(self, entry: Entry, headers: list[bytes]) -> None:
        mine, membership = entry.call.header, self._channel.membership
        for peer, packed in enumerate(headers):
            if packed != entry.call.packed:
                theirs = CallHeader.unpack(packed)
                text = f"{membership.describe(peer)} made {theirs}, this rank {mine}"
                raise HeaderMismatchError(text, peer, mine, theirs)
        if entry.gives:
            self._compare_sizes(entry)

    def _compare_sizes(self, entry: Entry) -> None:
        """Look at all pairs, so that all members come to the same conclusion."""
        mine = np.array([entry.gives, entry.wants], np.int64)
        rows = self._all_gather(mine.reshape(-1).view(np.uint8), entry.call.deadline)
        table = np.stack([row.view(np.int64).reshape(mine.shape) for row in rows])
        given, wanted = table[:, 0], table[:, 1].T
        wrong = np.argwhere(given != wanted)
        if not wrong.size:
            return
        source, into = map(int, wrong[0])
        membership, header = self._channel.membership, entry.call.header
        raise HeaderMismatchError(
            f"{membership.describe(source)} has {given[source, into]} bytes for"
            f" {membership.describe(into)}, which expects {wanted[source, into]}, in {header}",
            source if source != self._channel.rank else into,
            header,
            header,
        )

    def _all_gather(
        self, mine: np.ndarray[tuple[int], np.dtype[np.uint8]], deadline: Deadline
    ) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        self._rounds += 1
        elements = mine.size * self._channel.size
        header = CallHeader(self._rounds, elements, NO_ROOT, Kind.ALL_GATHER, _BYTE, 0)
        rows = [np.empty(mine.size, np.uint8) for _ in range(self._channel.size)]
        self._channel.all_gather(Call(header, deadline), rows, mine)
        return rows


def _in_terms_of(call: Call, error: DistError) -> DistError:
    """Return ``error`` as one of the call that was to be compared."""
    if isinstance(error, CommunicatorTimeoutError):
        # Whom a link waited for may itself have waited for somebody else.
        waited = f"{call.header}: after {call.deadline.seconds:g} s not all members have come to it"
        return CommunicatorTimeoutError(waited, error.peer)
    return error
