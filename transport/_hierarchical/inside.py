"""The members on this rank's host, who have a communicator of their own.

To the rest of the group they are known by other numbers. What is said about them outside (errors,
``call.waiting_for``) uses the numbers of the whole group.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from transport._call import Call
from transport._communicators.base import Communicator
from transport._communicators.forwarding import Forwarding
from transport._communicators.runtime import Membership
from transport._errors import CommunicatorTimeoutError, HeaderMismatchError, PeerLostError
from transport._operands.reduce_op import Flat
from transport._store.prefix_store import PrefixStore


@dataclass(frozen=True, slots=True)
class PartMembership(Membership):
    """The place of a rank among some members of a group, who are ``whole_ranks`` of the whole."""

    whole_ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, whole: Membership, name: str, members: tuple[int, ...]) -> PartMembership:
        """Return the place of ``whole.rank`` among ``members``, a part called ``name``."""
        return cls(
            f"{whole.group}/{name}",
            members.index(whole.rank),
            tuple(whole.ranks[member] for member in members),
            PrefixStore(name, whole.store),
            whole.runtime,
            whole_ranks=members,
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


class Inside(Forwarding):
    """The collectives of the members on one host, through ``communicator``, which this owns."""

    def __init__(self, communicator: Communicator, members: Sequence[int]) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.communicator = communicator
        self._members = members

    def _hand_on(self, call: Call, collective: str, *arguments: Any) -> None:
        with self._part(call) as part:
            getattr(self.communicator, collective)(part, *arguments)

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
