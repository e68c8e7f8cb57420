"""Some members of a group, over the links that the whole group has."""

from __future__ import annotations

from collections.abc import Sequence

from transport.algorithms.collectives import LinkCollectives
from transport.call import Call
from transport.choosing.choice import Thresholds
from transport.link import Link
from transport.links.communicator import LinkCommunicator
from transport.operands.flat import Scratch


class Selection(LinkCollectives):
    """The collectives of the ``members`` (ranks of ``whole``, this one among them) that are chosen.

    A rank here is a member's place among them; ``whole`` may be a selection itself. Errors speak of
    the ranks of the whole group. Making one sends nothing, and links that were opened before are
    used again.
    """

    def __init__(
        self,
        whole: LinkCommunicator | Selection,
        members: Sequence[int],
        table: Thresholds,
        scratch: Scratch,
    ) -> None:
        self.rank = members.index(whole.rank)
        self.size = len(members)
        self.table = table
        self.scratch = scratch
        self.tuned_as = whole.tuned_as
        self._whole = whole
        self._members = members

    def link(self, peer: int, call: Call) -> Link:
        return self._whole.link(self._members[peer], call)

    def reach(self, peers: Sequence[int], call: Call) -> None:
        self._whole.reach([self._members[peer] for peer in peers], call)

    def check_open(self) -> None:
        self._whole.check_open()
