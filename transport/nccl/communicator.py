"""Collectives by NCCL, on a stream of the group's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise

from transport.backends import CommunicatorFactory
from transport.call import Call
from transport.communicator import Communicator
from transport.cuda.device_communicator import DeviceCommunicator
from transport.cuda.device_state import DeviceStream, check_one_device
from transport.cuda.driver import DeviceMemory, Driver
from transport.cuda.flat import DeviceFlat
from transport.cuda.staged import make_communicator as make_staged
from transport.cuda.watch import Watch
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
)
from transport.nccl import library as nccl
from transport.nccl.dtypes import plan_copy, plan_reduction
from transport.nccl.ledger import Entry, Ledger
from transport.nccl.library import NcclComm, NcclLibrary, load_nccl
from transport.nccl.meeting import in_time, join
from transport.reduce_op import RedOpType, ReduceOp
from transport.runtime import Membership
from transport.store.prefix_store import PrefixStore
from transport.tcp import TcpCommunicator

Fallback = Callable[[], Communicator[DeviceFlat]]
Channel = Callable[[], Communicator]
CLOSE_SECONDS = 5.0
IN_USE_SECONDS = 1.0


class NcclCommunicator(DeviceCommunicator):
    """A member of a group in which every rank has a GPU of its own.

    Members meet at the first call on an array, whose device is from then on this rank's. Calls
    return when NCCL's work is on the group's stream; a thread watches their deadlines and asks
    NCCL for errors.

    What NCCL does not have goes by ``fallback``: messages with tags, dtypes and operations that it
    does not know (all members come to the same conclusion, from what they must agree on), and the
    barrier. NCCL does not compare what its members call; that is done behind the calls, over
    ``channel`` (``ledger.py``).
    """

    def __init__(
        self,
        membership: Membership,
        fallback: Fallback,
        channel: Channel,
        library: NcclLibrary | None = None,
    ) -> None:
        super().__init__(membership)
        self._library = library or load_nccl()
        self._make_fallback = fallback
        self._make_channel = channel
        self._ledger: Ledger | None = None
        self._lock = threading.Lock()
        self._fallback: Communicator[DeviceFlat] | None = None
        self._lost: dict[int, str] = {}
        self._comm: NcclComm | None = None
        self._stream: DeviceStream | None = None
        self._can_split = False
        self._abort_reason: str | None = None
        # Held by who uses the communicator: NCCL's abort lets go of its memory.
        self._in_use = threading.Lock()
        self._watch = Watch(f"meshlib-nccl-{membership.rank}", self._async_error, self._abort_nccl)

    # Collectives.

    def barrier(self, call: Call) -> None:  # noqa: D102
        with self._by_host(call) as other:
            other.barrier(call)

    def broadcast(self, call: Call, buffer: DeviceFlat, root: int) -> None:  # noqa: D102
        plan = plan_copy(buffer.dtype)
        with self._run(call, [buffer]) as (comm, stream):
            at, count = buffer.pointer, plan.count(buffer.size)
            comm.broadcast(at, at, count, plan.dtype, root, stream.handle)

    def all_reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp) -> None:  # noqa: D102
        plan = plan_reduction(buffer.dtype, op)
        if plan is None:
            with self._by_host(call) as other:
                other.all_reduce(call, buffer, op)
            return
        with self._run(call, [buffer]) as (comm, stream):
            at = buffer.pointer
            _scale(stream, buffer, at, op)
            comm.all_reduce(at, at, plan.count(buffer.size), plan.dtype, plan.op, stream.handle)

    def reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp, root: int) -> None:  # noqa: D102
        plan = plan_reduction(buffer.dtype, op)
        if plan is None:
            with self._by_host(call) as other:
                other.reduce(call, buffer, op, root)
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
            with self._by_host(call) as other:
                other.reduce_scatter(call, output, inputs, op)
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
        gives = [input_.nbytes if peer == root else 0 for peer in range(self.size)]
        wants = [output.nbytes for output in outs] or [0] * self.size
        with self._run(call, [input_, *outs], (), gives, wants) as (comm, stream):
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
        gives = [part.nbytes for part in ins] or [0] * self.size
        wants = [output.nbytes if peer == root else 0 for peer in range(self.size)]
        with self._run(call, [output, *ins], (), gives, wants) as (comm, stream):
            if root != self.rank:
                self._exchange(comm, stream, {}, {root: output})
                return
            _copy(stream, output, output.pointer, ins[root].pointer)
            others = {peer: part for peer, part in enumerate(ins) if peer != root}
            self._exchange(comm, stream, others, {})

    def all_to_all(  # noqa: D102
        self, call: Call, outputs: Sequence[DeviceFlat], inputs: Sequence[DeviceFlat]
    ) -> None:
        gives, wants = [part.nbytes for part in inputs], [part.nbytes for part in outputs]
        with self._run(call, [*outputs, *inputs], (), gives, wants) as (comm, stream):
            mine = inputs[self.rank]
            _copy(stream, mine, outputs[self.rank].pointer, mine.pointer)
            others = [peer for peer in range(self.size) if peer != self.rank]
            self._exchange(
                comm,
                stream,
                {peer: inputs[peer] for peer in others},
                {peer: outputs[peer] for peer in others},
            )

    # Groups.

    def connect(self, call: Call, driver: Driver, device: int) -> None:
        """Meet the other members now, on ``device``, not at the first call on an array."""
        self._post(call)
        if self._comm is None:
            self._join(call, driver, device)

    def split(
        self, call: Call, part: Membership | None, like: Communicator[DeviceFlat] | None
    ) -> bool:
        """Give ``like``, the communicator of ``part``, what it needs out of this one's.

        All members call; the parts, which do not overlap, are some of them, in any order. None
        is for members of no part. The new communicator connects nothing anew. Waits for the calls
        that are under way. False, on all members, if nothing was done: this one is not connected,
        or NCCL is older than 2.18.
        """
        self._post(call)
        if self._comm is None or self._stream is None or not self._can_split:
            return False
        comm, device = self._comm, self._stream.device
        if not self._watch.drain(call.deadline.remaining()):
            raise CommunicatorTimeoutError(
                f"{call.header}: the calls before it were not done within"
                f" {call.deadline.seconds:g} s",
                None,
            )
        color, key = nccl.NO_COLOR, 0
        if part is not None:
            color, key = self.membership.ranks.index(part.ranks[0]), part.rank
        with self._in_use:
            self._check_open(call)
            found = in_time(
                lambda: comm.split(color, key),
                self._stream.driver,
                device,
                call,
                lambda: self._abort_reason,
            )
        if found is not None:
            assert isinstance(like, NcclCommunicator)
            like.adopt(found, DeviceStream(self._stream.driver, device))
        return True

    def adopt(self, comm: NcclComm, stream: DeviceStream) -> None:
        """Be connected by ``comm``, which has the members of this one."""
        with self._lock:
            self._comm, self._stream, self._can_split = comm, stream, True

    # Point to point: NCCL has neither tags nor receives from anybody.

    def send(self, call: Call, buffer: DeviceFlat, dst: int, tag: int) -> None:  # noqa: D102
        self._other().send(call, buffer, dst, tag)

    def recv(self, call: Call, buffer: DeviceFlat, src: int | None, tag: int) -> int:  # noqa: D102
        return self._other().recv(call, buffer, src, tag)

    def lose(self, peer: int, reason: str) -> None:  # noqa: D102
        with self._lock:
            self._lost[peer] = reason
            fallback = self._fallback
        if fallback is not None:
            fallback.lose(peer, reason)

    @property
    def receiving(self) -> bool:  # noqa: D102
        fallback = self._fallback
        return fallback is not None and fallback.receiving

    # The end.

    def abort(self, reason: str) -> None:  # noqa: D102
        with self._lock:
            first = self._abort_reason is None
            if first:
                self._abort_reason = reason
            fallback, ledger = self._fallback, self._ledger
        if fallback is not None:
            fallback.abort(reason)
        if ledger is not None:
            ledger.abort(reason)
        if first:
            # NCCL's own abort waits for its kernels to end.
            threading.Thread(
                target=self._stop, args=(reason,), name="meshlib-nccl-abort", daemon=True
            ).start()

    def close(self) -> None:  # noqa: D102
        if self._comm is not None and not self._watch.drain(CLOSE_SECONDS):
            self._stop("the communicator was closed while the device was at work")
        # The others may not have compared this member's last calls yet.
        if self._ledger is not None and self._abort_reason is None:
            self._ledger.drain(CLOSE_SECONDS)
        with self._lock:
            # The watch may be aborting it at this moment: who takes it ends it.
            comm, self._comm = self._comm, None
            if self._abort_reason is None:
                self._abort_reason = "the communicator was closed"
            fallback, self._fallback = self._fallback, None
            stream, self._stream = self._stream, None
            ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()
        if comm is not None:
            with suppress(*self._library.errors):
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
            # A call that NCCL itself holds up ends by the abort alone.
            free = self._in_use.acquire(timeout=IN_USE_SECONDS)
            try:
                # One that is broken says so when it is let go of: it is known.
                with suppress(*self._library.errors):
                    comm.abort()
            finally:
                if free:
                    self._in_use.release()

    def _on_dispute(self, entry: Entry, error: DistError) -> None:
        """End everything: members disagree in a call, or one has not made it."""
        self._watch.fail(error, entry.call.header)
        with self._lock:
            fallback = self._fallback
        if fallback is not None:
            fallback.abort(str(error))
        self._abort_nccl(error)
        if entry.completion is not None:
            entry.completion.tell()

    # How it is done.

    def _post(self, call: Call, gives: Sequence[int] = (), wants: Sequence[int] = ()) -> Entry:
        """Have ``call`` compared with the other members'; see ``Ledger.post``."""
        with self._lock:
            self._check_open(call)
            if self._ledger is None:
                self._ledger = Ledger(self._make_channel(), self._on_dispute)
            return self._ledger.post(call, gives, wants)

    @contextmanager
    def _by_host(self, call: Call) -> Generator[Communicator[DeviceFlat]]:
        """Give what a collective is made with that NCCL does not have."""
        self._post(call)
        try:
            yield self._other()
        except CommunicatorAbortedError:
            self._watch.check_for(call)  # if there is trouble, that is why it was aborted
            raise

    @contextmanager
    def _run(
        self,
        call: Call,
        flats: Sequence[DeviceFlat],
        owners: Sequence[object] = (),
        gives: Sequence[int] = (),
        wants: Sequence[int] = (),
    ) -> Generator[tuple[NcclComm, DeviceStream]]:
        """Give what a call is made with, in order behind ``flats``; leave its end with them.

        What the block adds to ``owners`` lives until then. ``gives`` and ``wants`` are the bytes
        for and of each member where their numbers are not in the header.
        """
        check_one_device(flats)
        entry = self._post(call, gives, wants)
        try:
            comm, stream = self._joined(call, flats[0])
        except CommunicatorAbortedError:
            self._watch.check_for(call)
            raise
        stream.begin(flats)
        try:
            with self._in_use, stream.driver.on(stream.device):
                self._check_open(call)
                yield comm, stream
        except DistError:
            raise
        except self._library.errors as error:
            raise DistBackendError(
                f"NCCL failed in {call.header}: {error}; NCCL_DEBUG=WARN tells more"
            ) from error
        completion = stream.end(call, flats, *owners)
        completion.settle_by(lambda: entry.compared)
        entry.completion = completion
        self._watch.add(call, completion)

    def _joined(self, call: Call, flat: DeviceFlat) -> tuple[NcclComm, DeviceStream]:
        self._check_open(call)
        if self._comm is None or self._stream is None:
            self._join(call, flat.driver, flat.device)
        assert self._stream is not None
        if flat.device != self._stream.device:
            raise ValueError(
                f"an array is on cuda:{flat.device}, but this rank's calls on this group are on"
                f" cuda:{self._stream.device}, the device of its first one; expected that device:"
                " copy the array there"
            )
        assert self._comm is not None
        return self._comm, self._stream

    def _join(self, call: Call, driver: Driver, device: int) -> None:
        stream = DeviceStream(driver, device)
        joined = join(
            self.membership, self._library, driver, device, call, lambda: self._abort_reason
        )
        with self._lock:
            self._stream = stream
            if self._abort_reason is None:
                self._comm, self._can_split = joined.comm, joined.can_split
        if self._comm is None:
            joined.comm.abort()
        self._check_open(call)

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
                for peer, reason in self._lost.items():
                    self._fallback.lose(peer, reason)
            return self._fallback

    def _check_open(self, call: Call) -> None:
        self._watch.check_for(call)
        if self._abort_reason is not None:
            raise CommunicatorAbortedError(self._abort_reason)

    def _async_error(self) -> str | None:
        if not self._in_use.acquire(blocking=False):
            return None  # asked again soon
        try:
            comm = self._comm
            error = None if comm is None else comm.async_error()
        except self._library.errors as raised:
            error = str(raised)
        finally:
            self._in_use.release()
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
    beside = replace(
        membership,
        group=f"{membership.group}/ledger",
        store=PrefixStore("ledger", membership.store),
    )
    return NcclCommunicator(membership, lambda: make_staged(membership, cpu), lambda: cpu(beside))
