"""Collectives and messages through shared memory, for members on one host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transport._calls.call import Call
from transport._calls.header import Kind
from transport._communicators.runtime import Membership
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    PeerLostError,
)
from transport._links.messaging import MessagingCommunicator
from transport._operands.flat import as_bytes
from transport._operands.reduce_op import Flat, ReduceOp
from transport._shm.arena import Arena
from transport._shm.calls import Calls
from transport._shm.meeting.directory import HostPeers
from transport._shm.meeting.endpoint import ABORTED, DIED, LEFT, ShmEndpoint
from transport._shm.messages import INBOX, Messages
from transport._shm.segment import OwnedSegment, Segment, no_memory
from transport._shm.sizes import DEFAULT_SIZES, Sizes
from transport._shm.support import the_core

_GROUP = "group"
_NO_MEMBER = -1

# Read once: looking up a member of an enumeration is slow.
_BROADCAST, _GATHER, _SCATTER = Kind.BROADCAST, Kind.GATHER, Kind.SCATTER
_BARRIER, _ALL_REDUCE = Kind.BARRIER, Kind.ALL_REDUCE
_ALL_GATHER, _ALL_TO_ALL = Kind.ALL_GATHER, Kind.ALL_TO_ALL
_REDUCE, _REDUCE_SCATTER = Kind.REDUCE, Kind.REDUCE_SCATTER


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The result of the first meeting of all members."""

    calls: Calls
    arena: Arena


class ShmCommunicator(MessagingCommunicator):
    """A communicator whose members, at least two, share memory.

    Members find each other at the first collective. The first member makes the segment, and the
    others fetch it from its endpoint. Each member is connected to every other one, and so notices
    when a process ends. ``sizes`` must be equal on all members.

    ``members`` are the group ranks, ascending, of the members that share memory; by default all.
    Collectives run among them, and ``rank`` and ``size`` count only them. Messages, calls and
    errors have group ranks.

    Raises DistBackendError if this process cannot share memory (``unsupported_reason``).
    """

    mailbox: Messages
    takes_gaps = True

    def __init__(
        self,
        membership: Membership,
        sizes: Sizes = DEFAULT_SIZES,
        members: Sequence[int] | None = None,
    ) -> None:
        self._core: Any = the_core()
        runtime, group = membership.runtime, membership.group
        endpoint = runtime.shared("shm-endpoint", lambda: ShmEndpoint(runtime.secret))
        # No object made here may refer back to this one. Without a cycle, the mappings are freed
        # together with this object.
        self._members = members or range(membership.size)
        host_peers = HostPeers(membership, self._members, endpoint)
        super().__init__(membership, Messages(membership, host_peers, sizes))
        self.rank = self._members.index(membership.rank)
        self.size = len(self._members)
        self._host_peers = host_peers
        self._sizes = sizes
        # Guards the fields that the endpoint's thread uses too.
        self._lock = threading.Lock()
        self._owned: dict[str, OwnedSegment] = {INBOX: self.mailbox.inbox}
        self._gone: dict[int, PeerLostError] = {}
        self._dead: list[int] = []
        self._meeting: _Meeting | None = None
        self._ready: _Meeting | None = None
        self._failure: str | None = None
        self._endpoint = endpoint
        endpoint.register(group, self)
        host_peers.publish()

    # Collectives.

    def barrier(self, call: Call) -> None:
        self._run(_BARRIER, 0, call)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        inputs, outputs = ([buffer], ()) if root == self.rank else ((), [buffer])
        self._run(_BROADCAST, root, call, inputs, outputs)

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        self._run(_ALL_REDUCE, 0, call, (), [buffer], op)

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        inputs, outputs = ((), [buffer]) if root == self.rank else ([buffer], ())
        self._run(_REDUCE, root, call, inputs, outputs, op)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        self._run(_ALL_GATHER, 0, call, [input_], outputs)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        self._run(_REDUCE_SCATTER, 0, call, inputs, [output], op)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        self._run(_GATHER, root, call, [input_], outputs or ())

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        self._run(_SCATTER, root, call, inputs or (), [output])

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        self._run(_ALL_TO_ALL, 0, call, inputs, outputs)

    def allocate(self, call: Call, count: int, dtype: np.dtype[np.generic]) -> Flat:
        """See ``Communicator.allocate``. The memory is freed with the last reference to it."""
        arena, nbytes = self._met(call).arena, count * dtype.itemsize
        self.barrier(call)
        free = arena.dropped()
        if free.size:
            self.all_reduce(call, free, ReduceOp.MIN)
        if not arena.settle(free, nbytes):
            self._grow(call, arena, nbytes)
        return arena.take(count, dtype)

    def _grow(self, call: Call, arena: Arena, nbytes: int) -> None:
        """Add a segment with room for ``nbytes`` more per member to the arena."""
        number, size = arena.new_segment(nbytes)
        name = f"arena-{number}"
        if self.rank == 0:
            segment = OwnedSegment(size, name)
            with self._lock:
                self._owned[name] = segment
            self.barrier(call)
            self._add(arena, segment, nbytes)
            self.barrier(call)
            # All members have mapped it: the mappings keep the memory alive.
            with self._lock:
                del self._owned[name]
            segment.close()
        else:
            self.barrier(call)
            self._add(arena, self._host_peers.fetch(self._members[0], name, call), nbytes)
            self.barrier(call)

    def _add(self, arena: Arena, segment: Segment, nbytes: int) -> None:
        try:
            arena.add(segment)
        except OSError as error:
            raise self._no_memory(nbytes, error) from error

    def _no_memory(self, nbytes: int, error: OSError) -> DistBackendError:
        return no_memory(self.membership.describe(self.membership.rank), nbytes, error)

    def share(self, call: Call, sizes: Sequence[int]) -> list[Flat | None]:
        """See ``Communicator.share``. Each member makes a segment, and fetches the others'."""
        rank, name = self.membership.rank, f"window-{call.header.sequence}"
        self._met(call)
        mine = OwnedSegment(max(sizes[rank], 1), name)
        with self._lock:
            self._owned[name] = mine
        try:
            mine.allocate(0, mine.nbytes, self.size)
        except OSError as error:
            raise self._no_memory(sizes[rank], error) from error
        self.barrier(call)
        shared: list[Flat | None] = [None] * self.membership.size
        for peer in self._members:
            segment = mine if peer == rank else self._host_peers.fetch(peer, name, call)
            if segment.nbytes < sizes[peer]:
                who = self.membership.describe(peer)
                text = f"{who} shares {segment.nbytes} bytes; expected {sizes[peer]} or more"
                raise DistBackendError(text)
            shared[peer] = np.frombuffer(segment.data, np.uint8, sizes[peer])
        self.barrier(call)
        # All members have mapped it: the mappings keep the memory alive.
        with self._lock:
            del self._owned[name]
        mine.close()
        return shared

    def check_peer(self, peer: int) -> None:
        """See ``Communicator.check_peer``."""
        self._check_usable()
        if peer in self._gone:
            raise self._cause(peer)

    # Point to point.

    def send(self, call: Call, buffer: Flat, dst: int, tag: int) -> None:
        # The common case bypasses ``super().send``: ``post`` records the peer if it has to wait.
        if dst == self.membership.rank or self.abort_reason is not None:
            super().send(call, buffer, dst, tag)
        else:
            self.mailbox.post(call, as_bytes(buffer), dst)

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        self.mailbox.post(call, data, dst)

    def takes_at_once(self, dst: int, nbytes: int) -> bool:
        return self.abort_reason is None and self.mailbox.has_room(dst, nbytes)

    def lose(self, peer: int, reason: str) -> None:
        self.mailbox.lose(peer, PeerLostError(reason, peer))

    def native_handle(self) -> Any:
        return None if self._ready is None else self._ready.calls.native

    def message_rings(self) -> tuple[Any, ...] | None:
        return self.mailbox.rings

    def lend_rings(self, peer: int) -> tuple[Any, ...] | None:
        """See ``Communicator.lend_rings``."""
        return self.mailbox.lend(peer)

    def resume(self, call: Call, status: int) -> None:
        calls = self._met(call).calls
        self._attempt(calls, calls.resume, call, status)

    # The end.

    def abort(self, reason: str) -> None:
        self._end(reason, f"{ABORTED}: {reason}")

    def close(self) -> None:
        self._end("the communicator was closed", LEFT)
        with self._lock:
            owned = list(self._owned.values())
            self._owned.clear()
            self._meeting = self._ready = None
        for segment in owned:
            segment.close()

    def _end(self, reason: str, how: str) -> None:
        with self._lock:
            if self.abort_reason is None:
                self.abort_reason = reason
            meeting = self._meeting
        self._host_peers.cancel(reason)
        self._stop(reason)
        # Only after the receives were stopped: once notified, the other members may leave, and a
        # receive here would report their loss.
        self._endpoint.unregister(self.membership.group, how)
        if meeting is not None:
            meeting.calls.wake()

    # For the endpoint, in its thread.

    def offer(self, what: str) -> int:
        """Return a new descriptor of the memory ``what``; raise LookupError if there is none."""
        with self._lock:
            if self.abort_reason is not None:
                raise LookupError(LEFT)
            owned = self._owned.get(what)
            if owned is None and what == _GROUP and self.rank == 0:
                owned = self._own_segment()
            if owned is None or owned.fd < 0:
                raise LookupError(f"has no memory called {what!r}")
            return os.dup(owned.fd)

    def on_gone(self, rank: int, how: str) -> None:
        """Handle the loss of member ``rank``; ``how`` completes its name in messages."""
        error = PeerLostError(f"{self.membership.describe(rank)} {how}", rank)
        with self._lock:
            self._gone.setdefault(rank, error)
            if how == DIED:
                self._dead.append(rank)
            meeting = self._meeting
        self.mailbox.lose(rank, error)
        if meeting is not None:
            meeting.calls.wake()

    def on_kick(self) -> None:
        """Make room in this rank's inbox, because a sender waits for it."""
        self.mailbox.carry()

    # Meeting.

    def _check_usable(self) -> None:
        if self.abort_reason is not None or self._failure is not None:
            raise CommunicatorAbortedError(self.abort_reason or self._failure or "")

    def _met(self, call: Call) -> _Meeting:
        return self._ready or self._get_ready(call)

    def _run(
        self,
        kind: Kind,
        root: int,
        call: Call,
        inputs: Sequence[Flat] = (),
        outputs: Sequence[Flat] = (),
        op: ReduceOp | None = None,
    ) -> None:
        """Run a collective; see ``Calls.run``."""
        ready = self._ready
        if ready is None or self.abort_reason is not None or self._failure is not None:
            self._check_usable()
            ready = self._met(call)
        self._attempt(ready.calls, ready.calls.run, kind, root, call, inputs, outputs, op)

    def _attempt(self, calls: Calls, function: Callable[..., None], *arguments: Any) -> None:
        """Run or continue a collective. After a failure, members are out of step, so later
        collectives are refused.
        """
        try:
            function(*arguments)
        except BaseException as error:  # an interrupted wait, too
            calls.native.stop()
            self._failure = f"an earlier call failed: {error!r}"
            raise

    def _own_segment(self) -> OwnedSegment:
        """Return the group's segment, made at the first use. The caller holds the lock."""
        segment = self._owned.get(_GROUP)
        if segment is None:
            nbytes, block = self._core.measure_group(self.size, self._sizes.block)
            segment = OwnedSegment(nbytes, "group")
            try:
                self._core.create_group(segment.mapping, self.size, block)
            except OSError as error:
                raise self._no_memory(nbytes, error) from error
            self._owned[_GROUP] = segment
        return segment

    def _meet(self, call: Call) -> _Meeting:
        """Find all members and map the group's segment."""
        host_peers, first = self._host_peers, self._members[0]
        host_peers.look_up_all(call)
        for peer in self._members:
            if peer != self.membership.rank:
                host_peers.watch(peer, call)
        if self.rank == 0:
            with self._lock:
                self.check_open()
                segment: Segment = self._own_segment()
        else:
            try:
                segment = host_peers.fetch(first, _GROUP, call)
            except PeerLostError as error:
                raise self._cause(first, error) from error
        calls = Calls(segment, self._sizes, self.membership, self._members, self._check)
        meeting = _Meeting(calls, Arena(self.rank, self.size, calls.native.lay_out))
        with self._lock:
            self.check_open()
            self._meeting = meeting
        return meeting

    def _get_ready(self, call: Call) -> _Meeting:
        """Prepare the first collective: wait until all members have mapped the segment."""
        meeting = self._meeting or self._meet(call)
        self._attempt(meeting.calls, meeting.calls.run, _BARRIER, 0, call, (), ())
        with self._lock:
            self.check_open()
            self._ready = meeting
            # All members have mapped it: only the inbox's descriptor stays open.
            if (segment := self._owned.get(_GROUP)) is not None:
                segment.close()
        return meeting

    def _check(self, call: Call, peer: int) -> None:
        """Raise an error if ``peer`` is lost, the deadline passed, or this rank aborted."""
        self.check_open()
        if peer in self._gone:
            raise self._cause(peer)
        if call.deadline.expired and peer != _NO_MEMBER:
            raise CommunicatorTimeoutError(
                f"{call.header}: waited {call.deadline.seconds:g} s for"
                f" {self.membership.describe(peer)}",
                peer,
            )

    def _cause(self, peer: int, error: PeerLostError | None = None) -> PeerLostError:
        """Return the error for the loss of ``peer``. If ``peer`` only left after another member
        died, return that member's error, the likely cause.
        """
        lost = error or self._gone[peer]
        if self._dead and peer not in self._dead:
            lost = self._gone[self._dead[0]]
        return PeerLostError(str(lost), lost.peer)
