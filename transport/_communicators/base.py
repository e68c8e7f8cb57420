"""Communicators: the calls of a fixed group of members on flat typed buffers.

All ranks here are group ranks. Buffers are ``Flat``, 1-D, C-contiguous NumPy arrays of one native
dtype, and are used in place. Transports for device memory use ``DeviceFlat`` instead; their calls
return once the work is queued on a stream (``transport/_cuda/flat.py``). The caller has validated
all arguments; a communicator checks only data from the network.

One thread at a time makes collectives on a communicator, in the same order on every member. Any
number of threads may call ``send`` and ``recv`` at the same time, even during a collective.
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
    from typing_extensions import TypeVar  # For ``default``: most transports use ``Flat``.

    Buffer = TypeVar("Buffer", default=Flat)
else:
    from typing import TypeVar

    Buffer = TypeVar("Buffer")


class BufferCollectives(ABC, Generic[Buffer]):
    """The collectives of one rank with all or some members of a group.

    ``rank`` is this member's number among the ``size`` participating members.
    """

    rank: int
    size: int

    @abstractmethod
    def barrier(self, call: Call) -> None:
        """Wait until every member has called."""

    @abstractmethod
    def broadcast(self, call: Call, buffer: Buffer, root: int) -> None:
        """Copy ``root``'s ``buffer`` to all members."""

    @abstractmethod
    def all_reduce(self, call: Call, buffer: Buffer, op: ReduceOp) -> None:
        """Reduce the members' buffers in place. All members get the same bits."""

    @abstractmethod
    def reduce(self, call: Call, buffer: Buffer, op: ReduceOp, root: int) -> None:
        """Reduce into ``root``'s ``buffer``. Other members' buffers are not changed."""

    @abstractmethod
    def all_gather(self, call: Call, outputs: Sequence[Buffer], input_: Buffer) -> None:
        """Gather member i's ``input_`` into ``outputs[i]`` on every member.

        Members may have different sizes; every member knows all ``outputs[i].size``. ``input_`` may
        be ``outputs[rank]``.
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
        """Gather member i's ``input_`` into ``outputs[i]`` on ``root``; others pass None."""

    @abstractmethod
    def scatter(
        self, call: Call, output: Buffer, inputs: Sequence[Buffer] | None, root: int
    ) -> None:
        """Copy ``inputs[i]`` on ``root`` into member i's ``output``; others pass None."""

    @abstractmethod
    def all_to_all(self, call: Call, outputs: Sequence[Buffer], inputs: Sequence[Buffer]) -> None:
        """Copy member i's ``inputs[j]`` into member j's ``outputs[i]``. All sizes may differ."""


class Communicator(BufferCollectives[Buffer], Generic[Buffer]):
    """The interface of a transport. ``LinkCollectives`` implements the collectives over links."""

    abort_reason: str | None = None
    """The reason of an ``abort``, if the transport stores it."""
    takes_gaps: bool = False
    """True if ``all_gather`` and ``all_to_all`` also accept arrays that are not contiguous. These
    have two or more dims, and their elements are in C order.
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
        """Return uninitialised memory for ``count`` elements on which this communicator's
        collectives are fastest. All members must call it with equal arguments.

        The default is an ordinary array.
        """
        self.barrier(call)
        return cast(Buffer, np.empty(count, dtype))

    def share(self, call: Call, sizes: Sequence[int]) -> list[Flat | None]:
        """Return each member's zeroed shared memory, which all members may load and store.

        Member i shares ``sizes[i]`` bytes (uint8). The entry of a member that shares no memory with
        this one is None. All members must call it with equal ``sizes``.
        """
        shared: list[Flat | None] = [None] * self.membership.size
        rank = self.membership.rank
        shared[rank] = np.zeros(sizes[rank], np.uint8)
        return shared

    def check_peer(self, peer: int) -> None:
        """Raise ``PeerLostError`` if ``peer`` can no longer write to shared memory, and raise the
        errors of ``check_open``.
        """
        self.check_open()

    @quietly
    def scan(self, call: Call, buffer: Buffer, op: ReduceOp, exclusive: bool) -> None:
        """Reduce the buffers of members 0 to ``rank`` in place.

        With ``exclusive``, this member's own buffer is left out, and member 0 gets the op's neutral
        element. Each member computes the prefixes of all members for one part of the elements. It
        sends at most twice the bytes of its buffer.
        """
        data = cast(Flat, buffer)  # Transports for device memory override this method.
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
        """Send ``buffer`` with ``tag`` to ``dst``, which may be this rank.

        Returns when ``buffer`` may be reused. Messages to one member with one tag arrive in order.
        """

    def takes_at_once(self, dst: int, nbytes: int) -> bool:
        """True if a ``send`` of ``nbytes`` to ``dst`` would return without waiting for a peer.

        The caller then needs no other thread for the send. The answer is valid until the next
        message to ``dst``.
        """
        return False

    @abstractmethod
    def recv(self, call: Call, buffer: Buffer, src: int | None, tag: int) -> int:
        """Receive the next message with ``tag`` from ``src``, or from any member if None.

        Returns the sender. A message of another dtype or size raises ``HeaderMismatchError``. The
        message is then consumed and ``buffer`` is not changed.
        """

    def lose(self, peer: int, reason: str) -> None:
        """Record that member ``peer`` has left the job and will send nothing more.

        A receive that only ``peer`` could satisfy raises ``PeerLostError`` with ``reason``. Any
        thread may call it. Collectives detect a closed channel without it.
        """

    @property
    def lost(self) -> Collection[int]:
        """The members that this end already knows to be lost, so ``lose`` is unnecessary."""
        return ()

    def native_handle(self) -> Any:
        """Return the handle with which ``transport._native`` makes collectives, or None.

        ``resume`` continues a call that the compiled code started and could not finish.
        """
        return None

    def message_rings(self) -> tuple[Any, ...] | None:
        """Return the rings with which compiled code sends and receives messages, or None.

        The tuple has a list of the send rings by member, then a list of the receive rings (entries
        are None while unavailable). Compiled code may receive only while the four collections that
        follow are empty.
        """
        return None

    def lend_rings(self, peer: int) -> tuple[Any, ...] | None:
        """Return the rings to and from ``peer`` for compiled code that runs without the GIL, or
        None if the transport has none.
        """
        return None

    def resume(self, call: Call, status: int) -> None:
        """Continue a collective that the compiled core started and left with ``status``."""
        raise NotImplementedError

    @property
    def receiving(self) -> bool:
        """True if a message for a pending receive has begun to arrive."""
        return False

    def left_over(self) -> list[str]:
        """Describe the unreceived messages, for example "2 from rank 1 under tag 7"."""
        return []

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Wake every thread in a call of this communicator, and break the channels to the peers.

        These calls and all later calls raise ``CommunicatorAbortedError`` with ``reason``; peers
        may raise ``PeerLostError``. Thread-safe and idempotent; never blocks.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all channels. Data that was already sent still arrives. Idempotent."""
