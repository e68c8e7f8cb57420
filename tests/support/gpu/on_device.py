"""Runs the conformance suite's host buffers through a communicator on device memory.

Everything is uploaded, and read back, on a stream of the user's whose work is only ordered with the
communicator's by what the contract promises. The memory between is full of garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from tests.support.gpu.host_driver import HostDriver, HostMemory
from transport._calls.call import Call
from transport._communicators.base import Communicator
from transport._cuda import DeviceFlat, StreamOrder
from transport._operands.reduce_op import Flat, ReduceOp
from transport._waiting.deadline import Deadline


class OnDevice(Communicator):
    """Takes host buffers; ``comm`` works on copies of them in device memory."""

    def __init__(self, comm: Communicator[DeviceFlat], driver: HostDriver, device: int = 0) -> None:
        super().__init__(comm.membership)
        self.device = device
        self.comm = comm
        self.driver = driver
        self.stream = driver.create_stream(device)

    def upload(self, array: Flat) -> DeviceFlat:
        memory = self.driver.allocate(array.nbytes + 64, self.device)
        pointer = memory.pointer + 64  # an array seldom begins where its allocation does
        self.driver.copy_from_host(pointer, array.copy(), self.stream)
        # A call that fails releases it before that, and allocators reuse memory in this order.
        self.driver.machine.put(self.stream, partial(id, memory))
        return self.flat(memory, pointer, array)

    def flat(self, memory: HostMemory, pointer: int, like: Flat) -> DeviceFlat:
        begin = self.driver.create_event(self.device)
        begin.record(self.stream)
        order = StreamOrder(begin, lambda: self.stream, memory)
        return DeviceFlat(pointer, like.size, like.dtype, self.device, self.driver, order)

    def download(self, call: Call, pairs: Sequence[tuple[Flat, DeviceFlat]]) -> None:
        """Wait as a later user of the stream does; bring ``pairs`` back to the host."""
        if call.completion is not None:
            call.completion.join()
        for array, flat in pairs:
            if array.flags.writeable:
                self.driver.copy_to_host(array, flat.pointer, self.stream)
        done = self.driver.create_event(self.device)
        done.record(self.stream)
        deadline = Deadline.after(30.0)
        while not done.query():
            assert not deadline.expired, "the device never got there"

    def _run(self, call: Call, arrays: Sequence[Flat], method: str, *args: object) -> object:
        """Call ``method`` with device copies of ``arrays`` in place of themselves."""
        arrays = list({id(array): array for array in arrays}.values())
        flats = {id(array): self.upload(array) for array in arrays}

        def swap(arg: object) -> object:
            if isinstance(arg, np.ndarray):
                return flats[id(arg)]
            if isinstance(arg, list):
                return [flats[id(array)] for array in arg]
            return arg

        try:
            return getattr(self.comm, method)(call, *map(swap, args))
        finally:
            self.download(call, [(array, flats[id(array)]) for array in arrays])

    def barrier(self, call: Call) -> None:
        self.comm.barrier(call)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        self._run(call, [buffer], "broadcast", buffer, root)

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        self._run(call, [buffer], "all_reduce", buffer, op)

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        self._run(call, [buffer], "reduce", buffer, op, root)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        outs = list(outputs)
        mine = outs[self.rank]
        if mine.size and np.may_share_memory(mine, input_):
            input_ = mine
        self._run(call, [*outs, input_], "all_gather", outs, input_)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        self._run(call, [output, *inputs], "reduce_scatter", output, list(inputs), op)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        outs = None if outputs is None else list(outputs)
        self._run(call, [*(outs or []), input_], "gather", outs, input_, root)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        ins = None if inputs is None else list(inputs)
        self._run(call, [output, *(ins or [])], "scatter", output, ins, root)

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        outs, ins = list(outputs), list(inputs)
        self._run(call, [*outs, *ins], "all_to_all", outs, ins)

    def send(self, call: Call, buffer: Flat, dst: int, tag: int) -> None:
        self.comm.send(call, self.upload(buffer), dst, tag)

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        flat = self.upload(buffer)
        source = self.comm.recv(call, flat, src, tag)
        self.download(call, [(buffer, flat)])
        return source

    def abort(self, reason: str) -> None:
        self.comm.abort(reason)

    def close(self) -> None:
        self.comm.close()
