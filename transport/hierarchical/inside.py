"""The members on this rank's host, who have a communicator of their own.

To the rest of the group they are known by other numbers. What is said about them outside (errors,
``call.waiting_for``) uses the numbers of the whole group.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from transport.call import Call
from transport.communicator import Collectives, Communicator
from transport.errors import CommunicatorTimeoutError, HeaderMismatchError, PeerLostError
from transport.reduce_op import Flat, ReduceOp
from transport.runtime import Membership
from transport.store.prefix_store import PrefixStore


@dataclass(frozen=True, slots=True)
class PartMembership(Membership):
    """The place of a rank among some members of a group, who are ``whole_ranks`` of the whole."""

    whole_ranks: tuple[int, ...]

    @classmethod
    def of(cls, whole: Membership, name: str, members: tuple[int, ...]) -> PartMembership:
        """Return the place of ``whole.rank`` among ``members``, a part called ``name``."""
        return cls(
            f"{whole.group}/{name}",
            members.index(whole.rank),
            tuple(whole.ranks[member] for member in members),
            PrefixStore(name, whole.store),
            whole.runtime,
            members,
        )

    def describe(self, peer: int) -> str:
        """Return what messages call the member ``peer``, by its rank in the whole group."""
        rank, whole_rank = self.ranks[peer], self.whole_ranks[peer]
        return f"rank {rank}" + (f" (rank {whole_rank} of the group)" if rank != whole_rank else "")


class PartCall(Call):
    """A call of the whole group, as some ``members`` carry out their part of it."""

    __slots__ = ("_members", "_whole")

    def __init__(self, whole: Call, members: Sequence[int]) -> None:
        # Not through Call's: the header is packed already.
        self._whole = whole
        self._members = members
        self.packed = whole.packed
        self.sync = whole.sync
        self.deadline = whole.deadline

    @property
    def waiting_for(self) -> int | None:
        """See ``Call.waiting_for``; a number among the members."""
        peer = self._whole.waiting_for
        return None if peer is None else self._members.index(peer)

    @waiting_for.setter
    def waiting_for(self, peer: int | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._whole.waiting_for = None if peer is None else self._members[peer]


class Inside(Collectives):
    """The collectives of the members on one host, through ``communicator``, which this owns."""

    def __init__(self, communicator: Communicator, members: Sequence[int]) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.communicator = communicator
        self._members = members

    def barrier(self, call: Call) -> None:
        with self._part(call) as part:
            self.communicator.barrier(part)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        with self._part(call) as part:
            self.communicator.broadcast(part, buffer, root)

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        with self._part(call) as part:
            self.communicator.all_reduce(part, buffer, op)

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        with self._part(call) as part:
            self.communicator.reduce(part, buffer, op, root)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        with self._part(call) as part:
            self.communicator.all_gather(part, outputs, input_)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        with self._part(call) as part:
            self.communicator.reduce_scatter(part, output, inputs, op)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        with self._part(call) as part:
            self.communicator.gather(part, outputs, input_, root)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        with self._part(call) as part:
            self.communicator.scatter(part, output, inputs, root)

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        with self._part(call) as part:
            self.communicator.all_to_all(part, outputs, inputs)

    def allocate(self, call: Call, count: int, dtype: np.dtype[np.generic]) -> Flat:
        """See ``Communicator.allocate``."""
        with self._part(call) as part:
            return self.communicator.allocate(part, count, dtype)

    @contextmanager
    def _part(self, call: Call) -> Generator[Call]:
        try:
            yield PartCall(call, self._members)
        except (PeerLostError, CommunicatorTimeoutError, HeaderMismatchError) as error:
            if error.peer is not None:
                error.peer = self._members[error.peer]
            raise
