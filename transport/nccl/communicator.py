"""Collectives by NCCL, on a stream of the group's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from transport.backends import CommunicatorFactory
from transport.call import Call
from transport.communicator import Communicator
from transport.cuda.device_state import DeviceStream, check_one_device
from transport.cuda.driver import DeviceMemory
from transport.cuda.flat import DeviceFlat
from transport.cuda.staged import make_communicator as make_staged
from transport.cuda.watch import Watch
from transport.errors import CommunicatorAbortedError, DistBackendError, DistError
from transport.nccl import library as nccl
from transport.nccl.dtypes import plan_copy, plan_reduction
from transport.nccl.library import NcclComm, NcclLibrary, load_nccl
from transport.nccl.meeting import join
from transport.reduce_op import RedOpType, ReduceOp
from transport.runtime import Membership
from transport.tcp import TcpCommunicator

Fallback = Callable[[], Communicator[DeviceFlat]]
CLOSE_SECONDS = 5.0


class NcclCommunicator(Communicator[DeviceFlat]):
    """A member of a group in which every rank has a GPU of its own.

    Members meet at the first call on an array, whose device is from then on this rank's. Calls
    return when NCCL's work is on the group's stream; a thread watches their deadlines and asks
    NCCL for errors.

    What NCCL does not have goes by ``fallback``: messages with tags, dtypes and operations that it
    does not know (all members come to the same conclusion, from what they must agree on), and the
    barrier.
    """

    def __init__(
        self,
        membership: Membership,
        fallback: Fallback,
        library: NcclLibrary | None = None,
    ) -> None:
        super().__init__(membership)
        self._library = library or load_nccl()
        self._make_fallback = fallback
        self._lock = threading.Lock()
        self._fallback: Communicator[DeviceFlat] | None = None
        self._comm: NcclComm | None = None
        self._stream: DeviceStream | None = None
        self._abort_reason: str | None = None
        self._watch = Watch(f"meshlib-nccl-{membership.rank}", self._async_error, self._abort_nccl)

    # Collectives.

    def barrier(self, call: Call) -> None:  # noqa: D102
        self._other().barrier(call)

    def broadcast(self, call: Call, buffer: DeviceFlat, root: int) -> None:  # noqa: D102
        plan = plan_copy(buffer.dtype)
        with self._run(call, [buffer]) as (comm, stream):
            at, count = buffer.pointer, plan.count(buffer.size)
            comm.broadcast(at, at, count, plan.dtype, root, stream.handle)

    def all_reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp) -> None:  # noqa: D102
        plan = plan_reduction(buffer.dtype, op)
        if plan is None:
            self._other().all_reduce(call, buffer, op)
            return
        with self._run(call, [buffer]) as (comm, stream):
            at = buffer.pointer
            _scale(stream, buffer, at, op)
            comm.all_reduce(at, at, plan.count(buffer.size), plan.dtype, plan.op, stream.handle)

    def reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp, root: int) -> None:  # noqa: D102
        plan = plan_reduction(buffer.dtype, op)
        if plan is None:
            self._other().reduce(call, buffer, op, root)
            return
        owners: list[object] = []
        with self._run(call, [buffer], owners) as (comm, stream):
            source = _scaled(stream, buffer, op, owners)
            count = plan.count(buffer.size)
            at = buffer.pointer
            comm.reduce(source, at, count, plan.dtype, plan.op, root, stream.handle)

    def all_gather(  # noqa: D102
        self, call: Call, outputs: Sequence[DeviceFlat], input_: DeviceFlat
    ) -> None:
        plan = plan_copy(input_.dtype)
        owners: list[object] = []
        with self._run(call, [input_, *outputs], owners) as (comm, stream):
            source = input_.pointer
            if _same_sizes(outputs):
                into = outputs[0].pointer
                if not _is_one_block(outputs):
                    into = self._block(stream, outputs, owners)
                count = plan.count(input_.size)
                comm.all_gather(source, into, count, plan.dtype, stream.handle)
                for i, output in enumerate(outputs):
                    _copy(stream, output, output.pointer, into + i * output.nbytes)
                return
            with self._grouped():
                for root, output in enumerate(outputs):
                    count = plan.count(output.size)
                    if count:
                        at = output.pointer
                        mine = source if root == self.rank else at
                        comm.broadcast(mine, at, count, plan.dtype, root, stream.handle)

    def reduce_scatter(  # noqa: D102
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat], op: ReduceOp
    ) -> None:
        plan = plan_reduction(output.dtype, op)
        if plan is None:
            self._other().reduce_scatter(call, output, inputs, op)
            return
        owners: list[object] = []
        with self._run(call, [output, *inputs], owners) as (comm, stream):
            into = output.pointer
            if _same_sizes(inputs):
                first, count = inputs[0].pointer, plan.count(output.size)
                if op.kind is RedOpType.PREMUL_SUM or not _is_one_block(inputs):
                    first = self._block(stream, inputs, owners)
                    for i, part in enumerate(inputs):
                        at = first + i * part.nbytes
                        _copy(stream, part, at, part.pointer)
                        _scale(stream, part, at, op)
                comm.reduce_scatter(first, into, count, plan.dtype, plan.op, stream.handle)
                return
            sources = [_scaled(stream, part, op, owners) for part in inputs]
            with self._grouped():
                for root, (part, source) in enumerate(zip(inputs, sources, strict=True)):
                    count = plan.count(part.size)
                    # Elsewhere than on the root NCCL does not write; an address is wanted still.
                    at = into if root == self.rank else source
                    if count:
                        comm.reduce(source, at, count, plan.dtype, plan.op, root, stream.handle)

    def gather(  # noqa: D102
        self, call: Call, outputs: Sequence[DeviceFlat] | None, input_: DeviceFlat, root: int
    ) -> None:
        outs = list(outputs or ())
        with self._run(call, [input_, *outs]) as (comm, stream):
            if root != self.rank:
                self._exchange(comm, stream, {root: input_}, {})
                return
            _copy(stream, input_, outs[root].pointer, input_.pointer)
            others = {peer: out for peer, out in enumerate(outs) if peer != root}
            self._exchange(comm, stream, {}, others)

    def scatter(  # noqa: D102
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat] | None, root: int
    ) -> None:
        ins = list(inputs or ())
        with self._run(call, [output, *ins]) as (comm, stream):
            if root != self.rank:
                self._exchange(comm, stream, {}, {root: output})
                return
            _copy(stream, output, output.pointer, ins[root].pointer)
            others = {peer: part for peer, part in enumerate(ins) if peer != root}
            self._exchange(comm, stream, others, {})

    def all_to_all(  # noqa: D102
        self, call: Call, outputs: Sequence[DeviceFlat], inputs: Sequence[DeviceFlat]
    ) -> None:
        with self._run(call, [*outputs, *inputs]) as (comm, stream):
            mine = inputs[self.rank]
            _copy(stream, mine, outputs[self.rank].pointer, mine.pointer)
            others = [peer for peer in range(self.size) if peer != self.rank]
            self._exchange(
                comm,
                stream,
                {peer: inputs[peer] for peer in others},
                {peer: outputs[peer] for peer in others},
            )

    # Point to point: NCCL has neither tags nor receives from anybody.

    def send(self, call: Call, buffer: DeviceFlat, dst: int, tag: int) -> None:  # noqa: D102
        self._other().send(call, buffer, dst, tag)

    def recv(self, call: Call, buffer: DeviceFlat, src: int | None, tag: int) -> int:  # noqa: D102
        return self._other().recv(call, buffer, src, tag)

    # The end.

    def abort(self, reason: str) -> None:  # noqa: D102
        with self._lock:
            first = self._abort_reason is None
            if first:
                self._abort_reason = reason
            fallback = self._fallback
        if fallback is not None:
            fallback.abort(reason)
        if first:
            # NCCL's own abort waits for its kernels to end.
            threading.Thread(
                target=self._stop, args=(reason,), name="meshlib-nccl-abort", daemon=True
            ).start()

    def close(self) -> None:  # noqa: D102
        if self._comm is not None and not self._watch.drain(CLOSE_SECONDS):
            self._stop("the communicator was closed while the device was at work")
        with self._lock:
            # The watch may be aborting it at this moment: who takes it ends it.
            comm, self._comm = self._comm, None
            if self._abort_reason is None:
                self._abort_reason = "the communicator was closed"
            fallback, self._fallback = self._fallback, None
            stream, self._stream = self._stream, None
        if comm is not None:
            comm.destroy()
        self._watch.close()
        if fallback is not None:
            fallback.close()
        if stream is not None:
            stream.close()

    def _stop(self, reason: str) -> None:
        error = CommunicatorAbortedError(reason)
        self._watch.fail(error)
        self._abort_nccl(error)

    def _abort_nccl(self, error: DistError) -> None:
        """End NCCL's work, for all members: its kernels end in error elsewhere. May block."""
        with self._lock:
            if self._abort_reason is None:
                self._abort_reason = str(error)
            comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    # How it is done.

    @contextmanager
    def _run(
        self, call: Call, flats: Sequence[DeviceFlat], owners: Sequence[object] = ()
    ) -> Generator[tuple[NcclComm, DeviceStream]]:
        """Give what a call is made with, in order behind ``flats``; leave its end with them.

        What the block adds to ``owners`` lives until then.
        """
        check_one_device(flats)
        comm, stream = self._joined(call, flats[0])
        stream.begin(flats)
        try:
            with stream.driver.on(stream.device):
                yield comm, stream
        except DistError:
            raise
        except RuntimeError as error:  # both providers' errors are
            raise DistBackendError(
                f"NCCL failed in {call.header}: {error}; NCCL_DEBUG=WARN tells more"
            ) from error
        self._watch.add(call, stream.end(call, flats, *owners))

    def _joined(self, call: Call, flat: DeviceFlat) -> tuple[NcclComm, DeviceStream]:
        self._check_open()
        if self._comm is None or self._stream is None:
            stream = DeviceStream(flat.driver, flat.device)
            comm = join(
                self.membership,
                self._library,
                flat.driver,
                flat.device,
                call,
                lambda: self._abort_reason,
            )
            with self._lock:
                self._stream = stream
                if self._abort_reason is None:
                    self._comm = comm
            if self._comm is None:
                comm.abort()
            self._check_open()
        if flat.device != self._stream.device:
            raise ValueError(
                f"an array is on cuda:{flat.device}, but this rank's calls on this group are on"
                f" cuda:{self._stream.device}, the device of its first one; expected that device:"
                " copy the array there"
            )
        assert self._comm is not None
        return self._comm, self._stream

    @contextmanager
    def _grouped(self) -> Generator[None]:
        self._library.group_start()
        try:
            yield
        finally:
            self._library.group_end()

    def _exchange(
        self,
        comm: NcclComm,
        stream: DeviceStream,
        outward: dict[int, DeviceFlat],
        inward: dict[int, DeviceFlat],
    ) -> None:
        """Send and receive side by side; empty messages are left out at both ends."""
        with self._grouped():
            for peer, flat in outward.items():
                if flat.size:
                    comm.send(flat.pointer, flat.nbytes, nccl.UINT8, peer, stream.handle)
            for peer, flat in inward.items():
                if flat.size:
                    comm.recv(flat.pointer, flat.nbytes, nccl.UINT8, peer, stream.handle)

    def _block(
        self, stream: DeviceStream, flats: Sequence[DeviceFlat], owners: list[object]
    ) -> int:
        """Return the address of new memory for all of ``flats``, one behind the other."""
        memory = stream.driver.allocate(sum(flat.nbytes for flat in flats), stream.device)
        owners.append(memory)
        return memory.pointer

    def _other(self) -> Communicator[DeviceFlat]:
        with self._lock:
            if self._abort_reason is not None:
                raise CommunicatorAbortedError(self._abort_reason)
            if self._fallback is None:
                self._fallback = self._make_fallback()
            return self._fallback

    def _check_open(self) -> None:
        if self._watch.trouble is not None:
            raise self._watch.trouble
        if self._abort_reason is not None:
            raise CommunicatorAbortedError(self._abort_reason)

    def _async_error(self) -> str | None:
        comm = self._comm
        error = None if comm is None else comm.async_error()
        return None if error is None else f"NCCL reports {error}; NCCL_DEBUG=WARN tells more"


def _same_sizes(flats: Sequence[DeviceFlat]) -> bool:
    """Whether the buffers, whose sizes all members know, have one size. All members agree."""
    return len({flat.size for flat in flats}) == 1


def _is_one_block(flats: Sequence[DeviceFlat]) -> bool:
    """Whether the buffers lie one behind the other here. Another member's may not."""
    return all(one.pointer + one.nbytes == other.pointer for one, other in pairwise(flats))


def _copy(stream: DeviceStream, like: DeviceFlat, into: int, source: int) -> None:
    """Copy as many bytes as ``like`` has."""
    if like.size and into != source:
        stream.driver.copy(into, source, like.nbytes, stream.handle)


def _scale(stream: DeviceStream, flat: DeviceFlat, into: int, op: ReduceOp) -> None:
    """Apply what comes before the reduction."""
    if op.kind is RedOpType.PREMUL_SUM and flat.size:
        stream.driver.scale(into, flat.pointer, flat.dtype, flat.size, op.factor, stream.handle)


def _scaled(stream: DeviceStream, flat: DeviceFlat, op: ReduceOp, owners: list[object]) -> int:
    """Return where the input of a reduction is: scaled apart if it must be, since it is kept."""
    if op.kind is not RedOpType.PREMUL_SUM or not flat.size:
        return flat.pointer
    memory: DeviceMemory = stream.driver.allocate(flat.nbytes, stream.device)
    owners.append(memory)
    _scale(stream, flat, memory.pointer, op)
    return memory.pointer


def make_communicator(
    membership: Membership, cpu: CommunicatorFactory = TcpCommunicator
) -> NcclCommunicator:
    """Make a communicator whose fallback goes by way of the host and the transport ``cpu``."""
    return NcclCommunicator(membership, lambda: make_staged(membership, cpu))
