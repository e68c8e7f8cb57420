"""A communicator without peers, to trace, estimate or profile one rank of a large job.

Compare PyTorch's ``FakeProcessGroup`` and torchtitan's ``COMM_MODE``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport._calls.call import Call
from transport._links.messaging import MessagingCommunicator
from transport._operands.flat import copy
from transport._operands.reduce_op import Flat, ReduceOp


class FakeCommunicator(MessagingCommunicator):
    """Completes each call of one member at once, without the other members.

    A broadcast and a reduction leave this rank's own value. In a gather, each other member
    contributes this rank's array, repeated or cut to size. In an all-to-all, this rank receives
    from each member its own data for that member. A message, or a scatter by another root, is
    zeros.
    """

    def barrier(self, call: Call) -> None:
        self.check_open()

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        self.check_open()

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        self.check_open()

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        self.check_open()

    def scan(self, call: Call, buffer: Flat, op: ReduceOp, exclusive: bool) -> None:
        self.check_open()

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        self.check_open()
        for output in outputs:
            _fill(output, input_)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        self.check_open()
        copy(output, inputs[self.rank])

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        self.check_open()
        for output in outputs or ():
            _fill(output, input_)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        self.check_open()
        if inputs is None:
            output[:] = 0
        else:
            copy(output, inputs[self.rank])

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        self.check_open()
        for output, input_ in zip(outputs, inputs, strict=True):
            _fill(output, input_)

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        """Discard the message."""

    def takes_at_once(self, dst: int, nbytes: int) -> bool:
        return True

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        """Receive this rank's message to itself; from another rank, zeros.

        A message from any source is from the previous rank.
        """
        if src == self.rank:
            return super().recv(call, buffer, src, tag)
        self.check_open()
        buffer[:] = 0
        return (self.rank - 1) % self.size if src is None else src


def _fill(place: Flat, source: Flat) -> None:
    """Copy ``source`` into ``place``, repeated or cut to its size; an empty source gives zeros."""
    copy(place, source if place.size == source.size else np.resize(source, place.size))
