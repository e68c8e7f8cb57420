"""Collectives by NCCL, on the group's own stream.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transport._calls.call import Call
from transport._communicators.backends import CommunicatorFactory, over_tcp
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._cuda.device_state import (
    CLOSE_SECONDS,
    DeviceCommunicator,
    DeviceStream,
    check_one_device,
)
from transport._cuda.driver import Driver
from transport._cuda.flat import DeviceFlat
from transport._cuda.staged import make_communicator as make_staged
from transport._errors import CommunicatorAbortedError, DistError, PeerLostError
from transport._nccl import library as nccl
from transport._nccl import operands
from transport._nccl.call_comparer import CallComparer, PostedCall
from transport._nccl.connection import NcclConnection
from transport._nccl.library import NcclComm, NcclLibrary, load_nccl
from transport._operands.reduce_op import RedOpType, ReduceOp
from transport._store.prefix_store import PrefixStore

Fallback = Callable[[], Communicator[DeviceFlat]]
Channel = Callable[[], Communicator]


class NcclCommunicator(DeviceCommunicator):
    """A member of a group in which every rank has its own GPU.

    Members connect at the first call on an array; the array's device becomes this rank's device
    (``connection.py``). Calls return once NCCL's work is queued on the group's stream.

    ``fallback`` makes the communicator for calls that NCCL lacks: the barrier, messages, and some
    dtypes and operations. All members choose it alike, because the choice depends only on values
    that must be equal. ``channel`` makes the communicator that compares the members' calls, because
    NCCL does not (``call_comparer.py``).
    """

    def __init__(
        self,
        membership: Membership,
        fallback: Fallback,
        channel: Channel,
        library: NcclLibrary | None = None,
    ) -> None:
        super().__init__(membership)
        self._connection = NcclConnection(membership, library or load_nccl())
        self._make_fallback = fallback
        self._make_channel = channel
        self._lock = threading.Lock()
        self._comparer: CallComparer | None = None
        self._fallback: Communicator[DeviceFlat] | None = None
        self._lost: dict[int, str] = {}

    # Collectives.

    def barrier(self, call: Call) -> None:
        self._call_fallback(call, "barrier")

    def broadcast(self, call: Call, buffer: DeviceFlat, root: int) -> None:
        codes = operands.codes_for_copy(buffer.dtype)
        with self._run(call, [buffer]) as (comm, stream):
            at, count = buffer.pointer, codes.count(buffer.size)
            comm.broadcast(at, at, count, codes.dtype, root, stream.handle)

    def all_reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp) -> None:
        codes = operands.codes_for_reduction(buffer.dtype, op)
        if codes is None:
            self._call_fallback(call, "all_reduce", buffer, op)
            return
        with self._run(call, [buffer]) as (comm, stream):
            at = buffer.pointer
            operands.scale(stream, buffer, at, op)
            comm.all_reduce(at, at, codes.count(buffer.size), codes.dtype, codes.op, stream.handle)

    def scan(self, call: Call, buffer: DeviceFlat, op: ReduceOp, exclusive: bool) -> None:
        self._call_fallback(call, "scan", buffer, op, exclusive)

    def reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp, root: int) -> None:
        codes = operands.codes_for_reduction(buffer.dtype, op)
        if codes is None:
            self._call_fallback(call, "reduce", buffer, op, root)
            return
        owners: list[object] = []
        with self._run(call, [buffer], owners) as (comm, stream):
            source = operands.scaled(stream, buffer, op, owners)
            count = codes.count(buffer.size)
            at = buffer.pointer
            comm.reduce(source, at, count, codes.dtype, codes.op, root, stream.handle)

    def all_gather(self, call: Call, outputs: Sequence[DeviceFlat], input_: DeviceFlat) -> None:
        codes = operands.codes_for_copy(input_.dtype)
        owners: list[object] = []
        with self._run(call, [input_, *outputs], owners) as (comm, stream):
            source = input_.pointer
            if operands.have_one_size(outputs):
                into = outputs[0].pointer
                if not operands.are_one_block(outputs):
                    into = operands.new_block(stream, outputs, owners)
                count = codes.count(input_.size)
                comm.all_gather(source, into, count, codes.dtype, stream.handle)
                for i, output in enumerate(outputs):
                    operands.copy(stream, output, output.pointer, into + i * output.nbytes)
                return
            with self._grouped():
                for root, output in enumerate(outputs):
                    count = codes.count(output.size)
                    if count:
                        at = output.pointer
                        sent = source if root == self.rank else at
                        comm.broadcast(sent, at, count, codes.dtype, root, stream.handle)

    def reduce_scatter(
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat], op: ReduceOp
    ) -> None:
        codes = operands.codes_for_reduction(output.dtype, op)
        if codes is None:
            self._call_fallback(call, "reduce_scatter", output, inputs, op)
            return
        owners: list[object] = []
        with self._run(call, [output, *inputs], owners) as (comm, stream):
            into = output.pointer
            if operands.have_one_size(inputs):
                first, count = inputs[0].pointer, codes.count(output.size)
                if op.kind is RedOpType.PREMUL_SUM or not operands.are_one_block(inputs):
                    first = operands.new_block(stream, inputs, owners)
                    for i, part in enumerate(inputs):
                        at = first + i * part.nbytes
                        operands.copy(stream, part, at, part.pointer)
                        operands.scale(stream, part, at, op)
                comm.reduce_scatter(first, into, count, codes.dtype, codes.op, stream.handle)
                return
            sources = [operands.scaled(stream, part, op, owners) for part in inputs]
            with self._grouped():
                for root, (part, source) in enumerate(zip(inputs, sources, strict=True)):
                    count = codes.count(part.size)
                    # NCCL writes only on the root, but every rank must pass an address.
                    at = into if root == self.rank else source
                    if count:
                        comm.reduce(source, at, count, codes.dtype, codes.op, root, stream.handle)

    def gather(
        self, call: Call, outputs: Sequence[DeviceFlat] | None, input_: DeviceFlat, root: int
    ) -> None:
        outs = list(outputs or ())
        sends = [input_.nbytes if peer == root else 0 for peer in range(self.size)]
        expects = [output.nbytes for output in outs] or [0] * self.size
        with self._run(call, [input_, *outs], (), sends, expects) as (comm, stream):
            if root != self.rank:
                self._exchange(comm, stream, {root: input_}, {})
                return
            operands.copy(stream, input_, outs[root].pointer, input_.pointer)
            self._exchange(comm, stream, {}, dict(enumerate(outs)))

    def scatter(
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat] | None, root: int
    ) -> None:
        ins = list(inputs or ())
        sends = [part.nbytes for part in ins] or [0] * self.size
        expects = [output.nbytes if peer == root else 0 for peer in range(self.size)]
        with self._run(call, [output, *ins], (), sends, expects) as (comm, stream):
            if root != self.rank:
                self._exchange(comm, stream, {}, {root: output})
                return
            operands.copy(stream, output, output.pointer, ins[root].pointer)
            self._exchange(comm, stream, dict(enumerate(ins)), {})

    def all_to_all(
        self, call: Call, outputs: Sequence[DeviceFlat], inputs: Sequence[DeviceFlat]
    ) -> None:
        sends, expects = [part.nbytes for part in inputs], [part.nbytes for part in outputs]
        with self._run(call, [*outputs, *inputs], (), sends, expects) as (comm, stream):
            own = inputs[self.rank]
            operands.copy(stream, own, outputs[self.rank].pointer, own.pointer)
            self._exchange(comm, stream, dict(enumerate(inputs)), dict(enumerate(outputs)))

    # Groups.

    def connect(self, call: Call, driver: Driver, device: int) -> None:
        """Connect to the other members on ``device`` now, before the first call on an array."""
        self._post(call)
        self._connection.connect(call, driver, device)

    def split(
        self, call: Call, part: Membership | None, like: Communicator[DeviceFlat] | None
    ) -> bool:
        """Connect ``like``, the communicator of ``part``, by splitting this one.

        All members must call it; a member of no part passes None. The parts do not overlap; they
        may have any members in any order. No new connections are made. Waits for running calls.
        Returns False, on all members, if it did nothing because this communicator is not connected
        or NCCL is older than 2.18.
        """
        self._post(call)
        if not self._connection.can_split:
            return False
        color, key = nccl.NO_COLOR, 0
        if part is not None:
            color, key = self.membership.ranks.index(part.ranks[0]), part.rank
        found = self._connection.split(call, color, key)
        if found is not None:
            assert isinstance(like, NcclCommunicator)
            like._connection.adopt(*found)
        return True

    # Point to point, by the fallback: NCCL has neither tags nor receives from any source.

    def send(self, call: Call, buffer: DeviceFlat, dst: int, tag: int) -> None:
        self._get_fallback().send(call, buffer, dst, tag)

    def recv(self, call: Call, buffer: DeviceFlat, src: int | None, tag: int) -> int:
        return self._get_fallback().recv(call, buffer, src, tag)

    def lose(self, peer: int, reason: str) -> None:
        with self._lock:
            self._lost[peer] = reason
            fallback = self._fallback
        if fallback is not None:
            fallback.lose(peer, reason)

    @property
    def receiving(self) -> bool:
        fallback = self._fallback
        return fallback is not None and fallback.receiving

    def left_over(self) -> list[str]:
        fallback = self._fallback
        return [] if fallback is None else fallback.left_over()

    # The end.

    def abort(self, reason: str) -> None:
        self._connection.abort(reason)
        # The connection is aborted first, so that no other thread creates either of them later.
        with self._lock:
            fallback, comparer = self._fallback, self._comparer
        if fallback is not None:
            fallback.abort(reason)
        if comparer is not None:
            comparer.abort(reason)

    def close(self) -> None:
        self._connection.finish(CLOSE_SECONDS)
        # Other members may not have compared this member's last calls yet.
        if self._comparer is not None and self._connection.abort_reason is None:
            self._comparer.drain(CLOSE_SECONDS)
        self._connection.close()
        with self._lock:
            fallback, self._fallback = self._fallback, None
            comparer, self._comparer = self._comparer, None
        if comparer is not None:
            comparer.close()
        if fallback is not None:
            fallback.close()

    def _on_mismatch(self, entry: PostedCall, error: DistError) -> None:
        """End all calls after a mismatch, or after a member missed the deadline of a call."""
        self._connection.watchdog.fail(error, entry.call.header)
        with self._lock:
            fallback = self._fallback
        if fallback is not None:
            fallback.abort(str(error))
        self._connection.end(error)
        if entry.completion is not None:
            entry.completion.report_failure()

    # The implementation.

    def _post(
        self, call: Call, sends: Sequence[int] = (), expects: Sequence[int] = ()
    ) -> PostedCall:
        """Post ``call`` for comparison with the other members'; see ``CallComparer.post``."""
        with self._lock:
            self._connection.check_open(call)
            for peer, reason in self._lost.items():
                # The lost member has left and will launch no kernels.
                raise PeerLostError(f"{call.header}: {reason}", peer)
            if self._comparer is None:
                self._comparer = CallComparer(self._make_channel(), self._on_mismatch)
            return self._comparer.post(call, sends, expects)

    def _call_fallback(self, call: Call, collective: str, *arguments: Any) -> None:
        """Make a collective that NCCL lacks, through the host."""
        self._post(call)
        try:
            getattr(self._get_fallback(), collective)(call, *arguments)
        except CommunicatorAbortedError:
            self._connection.watchdog.check_for(call)  # Raises the error that led to the abort.
            raise

    @contextmanager
    def _run(
        self,
        call: Call,
        flats: Sequence[DeviceFlat],
        owners: Sequence[object] = (),
        sends: Sequence[int] = (),
        expects: Sequence[int] = (),
    ) -> Generator[tuple[NcclComm, DeviceStream]]:
        """Yield the communicator, and its stream after earlier work on ``flats``. Store the
        completion in ``flats``.

        Objects that the block adds to ``owners`` live until the completion. ``sends`` and
        ``expects`` are the bytes to and from each member, for kinds whose header lacks them.
        """
        check_one_device(flats)
        entry = self._post(call, sends, expects)
        comm, stream = self._connection.connect(call, flats[0].driver, flats[0].device)
        stream.begin(flats)
        with self._connection.in_use(call, stream):
            yield comm, stream
        completion = stream.end(call, flats, *owners)
        completion.settled = lambda: entry.compared
        entry.completion = completion
        self._connection.watchdog.add(call, completion)

    @contextmanager
    def _grouped(self) -> Generator[None]:
        self._connection.library.group_start()
        try:
            yield
        finally:
            self._connection.library.group_end()

    def _exchange(
        self,
        comm: NcclComm,
        stream: DeviceStream,
        outward: dict[int, DeviceFlat],
        inward: dict[int, DeviceFlat],
    ) -> None:
        """Send to and receive from other members at once. Both ends skip empty messages."""
        with self._grouped():
            for peer, flat in outward.items():
                if flat.size and peer != self.rank:
                    comm.send(flat.pointer, flat.nbytes, nccl.UINT8, peer, stream.handle)
            for peer, flat in inward.items():
                if flat.size and peer != self.rank:
                    comm.recv(flat.pointer, flat.nbytes, nccl.UINT8, peer, stream.handle)

    def _get_fallback(self) -> Communicator[DeviceFlat]:
        with self._lock:
            reason = self._connection.abort_reason
            if reason is not None:
                raise CommunicatorAbortedError(reason)
            if self._fallback is None:
                self._fallback = self._make_fallback()
                for peer, why in self._lost.items():
                    self._fallback.lose(peer, why)
            return self._fallback


def make_communicator(
    membership: Membership, cpu: CommunicatorFactory = over_tcp
) -> NcclCommunicator:
    """Make a communicator whose fallback goes through the host and the transport ``cpu``."""
    comparison = replace(
        membership,
        group=f"{membership.group}/comparer",
        store=PrefixStore("comparer", membership.store),
    )
    return NcclCommunicator(
        membership, lambda: make_staged(membership, cpu), lambda: cpu(comparison)
    )
