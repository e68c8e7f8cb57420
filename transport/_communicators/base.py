"""A communicator: a fixed set of members and the collectives on flat typed buffers.

All ranks here are group ranks. Buffers are ``Flat``: 1-D, C-contiguous NumPy arrays of one native
dtype; they are used in place. Transports of device memory have ``DeviceFlat`` instead, and their
calls return when the work is on a stream (``transport/_cuda/flat.py``). Arguments were validated
one floor above; a communicator checks only what arrives from the network.

One thread at a time makes collectives on a communicator, in the same order on every member.
Messages (``send``, ``recv``) are independent of them and of each other: any number of threads may
call them, also during a collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np

from transport._calls.call import Call
from transport._communicators.runtime import Membership
from transport._errors import CommunicatorAbortedError
from transport._operands.flat import Scratch, part_bounds
from transport._operands.operand import Operand
from transport._operands.prefixes import neutral, prefixes
from transport._operands.quiet import quietly
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # for the default: nearly all transports take ``Flat``

    Buffer = TypeVar("Buffer", default=Flat)
else:
    from typing import TypeVar

    Buffer = TypeVar("Buffer")


class BufferCollectives(ABC, Generic[Buffer]):
    """The collectives of one rank, with all members of a group or with some of them.

    ``rank`` is this member's number among them, ``size`` how many they are.
    """

    rank: int
    size: int

    @abstractmethod
    def barrier(self, call: Call) -> None:
        """Return when every member has called."""

    @abstractmethod
    def broadcast(self, call: Call, buffer: Buffer, root: int) -> None:
        """Copy ``root``'s ``buffer`` into everybody's."""

    @abstractmethod
    def all_reduce(self, call: Call, buffer: Buffer, op: ReduceOp) -> None:
        """Reduce the members' buffers in place: all end up with the same bits."""

    @abstractmethod
    def reduce(self, call: Call, buffer: Buffer, op: ReduceOp, root: int) -> None:
        """Reduce into ``root``'s ``buffer``. Other members' buffers are left as they were."""

    @abstractmethod
    def all_gather(self, call: Call, outputs: Sequence[Buffer], input_: Buffer) -> None:
        """Gather member i's ``input_`` into ``outputs[i]`` on every member. Sizes may differ
        by member; ``outputs[i].size`` is known to all. ``input_`` may be ``outputs[rank]``.
        """

    @abstractmethod
    def reduce_scatter(
        self, call: Call, output: Buffer, inputs: Sequence[Buffer], op: ReduceOp
    ) -> None:
        """Reduce the members' ``inputs[i]`` into member i's ``output``. Sizes may differ by i.
        ``inputs`` are not changed, unless ``output`` is ``inputs[rank]``.
        """

    @abstractmethod
    def gather(
        self, call: Call, outputs: Sequence[Buffer] | None, input_: Buffer, root: int
    ) -> None:
        """Gather member i's ``input_`` into ``outputs[i]`` on ``root`` (elsewhere None)."""

    @abstractmethod
    def scatter(
        self, call: Call, output: Buffer, inputs: Sequence[Buffer] | None, root: int
    ) -> None:
        """Copy ``inputs[i]`` of ``root`` (elsewhere None) into member i's ``output``."""

    @abstractmethod
    def all_to_all(self, call: Call, outputs: Sequence[Buffer], inputs: Sequence[Buffer]) -> None:
        """Copy member i's ``inputs[j]`` into member j's ``outputs[i]``. Sizes may all differ."""


class Communicator(BufferCollectives[Buffer], Generic[Buffer]):
    """The interface of a transport. ``LinkCollectives`` implements the collectives over links."""

    abort_reason: str | None = None
    """Why it was aborted, as far as it keeps that."""
    takes_gaps: bool = False
    """True if ``all_gather`` and ``all_to_all`` take arrays that do not lie in one piece, too. Such
    an array has two dims or more; its elements count in C order.
    """

    def check_open(self) -> None:
        """Raise ``CommunicatorAbortedError`` after an abort."""
        if self.abort_reason is not None:
            raise CommunicatorAbortedError(self.abort_reason)

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.rank = membership.rank
        self.size = membership.size

    def allocate(self, call: Call, count: int, dtype: np.dtype[np.generic]) -> Buffer:
        """Return memory for ``count`` elements, undefined contents, on which the collectives of
        this communicator are as fast as they can be. Every member calls, with equal arguments.

        A transport that has no such memory returns an ordinary array.
        """
        self.barrier(call)
        return cast(Buffer, np.empty(count, dtype))

    def share(self, call: Call, sizes: Sequence[int]) -> list[Flat | None]:
        """Return the bytes, zeros at first, of each member that all members may load and store.

        Member i has ``sizes[i]`` of them. Those of members that share no memory with this one are
        None. Every member calls, with equal ``sizes``.
        """
        shared: list[Flat | None] = [None] * self.membership.size
        rank = self.membership.rank
        shared[rank] = np.zeros(sizes[rank], np.uint8)
        return shared

    def check_peer(self, peer: int) -> None:
        """Raise ``PeerLostError`` if waiting for what ``peer`` writes to shared memory is
        pointless, and as ``check_open`` does.
        """
        self.check_open()

    @quietly
    def scan(self, call: Call, buffer: Buffer, op: ReduceOp, exclusive: bool) -> None:
        """Reduce the buffers of the members 0 to this one in place; with ``exclusive``, without
        this one's. The first member then gets the op's neutral element.

        Each member gets everybody's part of some elements, and returns everybody's prefixes. Each
        sends twice the bytes of its buffer at most, however many members there are.
        """
        data = cast(Flat, buffer)  # transports of device memory go via the host
        scaled = op.kind is RedOpType.PREMUL_SUM
        given = Operand(Scratch(), op, data.dtype).load(data, 0, data.size) if scaled else data
        parts = [part_bounds(data.size, self.size, member) for member in range(self.size)]
        start, stop = parts[self.rank]
        rows = np.empty((self.size, stop - start), given.dtype)
        self._swap_parts(call, list(rows), [given[slice(*part)] for part in parts])
        found = prefixes(op, rows.astype(reduction_dtype(data.dtype), copy=False))
        found = found.astype(data.dtype, copy=False)
        if exclusive:
            found = np.concatenate([np.full_like(found[:1], neutral(op, data.dtype)), found[:-1]])
        self._swap_parts(call, [data[slice(*part)] for part in parts], list(found))

    def _swap_parts(self, call: Call, outputs: list[Flat], inputs: list[Flat]) -> None:
        self.all_to_all(call, cast("list[Buffer]", outputs), cast("list[Buffer]", inputs))

    @abstractmethod
    def send(self, call: Call, buffer: Buffer, dst: int, tag: int) -> None:
        """Send ``buffer`` to ``dst`` (maybe this rank) under ``tag``; return when it may be
        reused. Messages to one member under one tag arrive in order.
        """

    def takes_at_once(self, dst: int, nbytes: int) -> bool:
        """True if a ``send`` of ``nbytes`` to ``dst`` would return now, without waiting for a peer.

        A caller that would start a thread to avoid waiting can then send itself. True holds until
        the next message to ``dst``.
        """
        return False

    @abstractmethod
    def recv(self, call: Call, buffer: Buffer, src: int | None, tag: int) -> int:
        """Receive the next message with ``tag`` from ``src``, or from any member when None.

        Returns the sender. A message of another dtype or size raises ``HeaderMismatchError``
        that says both; the message is consumed, ``buffer`` unchanged.
        """

    def lose(self, peer: int, reason: str) -> None:
        """Note that member ``peer`` has left the job: what it sent is all that comes from it.

        A receive that only it could still satisfy raises ``PeerLostError`` with ``reason``. Any
        thread; collectives notice by themselves when a channel closes.
        """

    @property
    def lost(self) -> Collection[int]:
        """The members that need not be named to ``lose``: this end has heard of them elsewhere."""
        return ()

    def native_handle(self) -> Any:
        """Return the handle by which compiled code makes collectives here; None: it cannot.

        Only ``transport._native`` uses it. A call that it begins and cannot end goes on with
        ``resume``.
        """
        return None

    def message_rings(self) -> tuple[Any, ...] | None:
        """Return the rings with which compiled code sends and receives by itself, or None.

        The tuple begins with a list of the ends to each member, and a list of the ends from each
        (None: not now). Four collections follow, which are empty while messages may be taken.
        """
        return None

    def lend_rings(self, peer: int) -> tuple[Any, ...] | None:
        """Return the ends of the rings to and from ``peer``, for compiled code that does without
        the interpreter's lock; None: it cannot.
        """
        return None

    def resume(self, call: Call, status: int) -> None:
        """Go on with a collective that the core has begun; ``status`` is what it said."""
        raise NotImplementedError

    @property
    def receiving(self) -> bool:
        """True if the message of a pending receive has begun to arrive."""
        return False

    def left_over(self) -> list[str]:
        """Name the messages that lie here unreceived: "2 from rank 1 under tag 7"."""
        return []

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Wake every thread in a call of this communicator, here and, through broken channels, on
        peers.

        These calls and all later ones raise ``CommunicatorAbortedError`` with ``reason``; peers may
        raise ``PeerLostError``. Thread-safe; idempotent; never blocks.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all channels. Data sent before still arrives. Idempotent."""
