"""Where a member's data lies that others read there, without its being staged."""

from __future__ import annotations

from collections.abc import Sequence

from transport.operands.copying import address, copy
from transport.operands.reduce_op import Flat
from transport.shm.collectives.arena import Arena
from transport.shm.messages.single_copy import PeerMemory

_PRIVATE = 1 << 63


class Places:
    """Finds and reads such data: in symmetric memory, or in large private arrays.

    The latter where ``memory`` is set, to what reads it, and where that pays. (The compiled core
    stages them in less time.) A place is a number that means the same to all members; 0 is none.
    """

    def __init__(self, arena: Arena) -> None:
        self.memory: PeerMemory | None = None
        self.arena = arena

    def locate(
        self, buffers: Sequence[Flat], *, private: bool, alone: bool = False
    ) -> list[int] | None:
        """Return the places of ``buffers``, which are sent in one call; None: they are staged.

        ``private``: they may be private arrays. ``alone``: as in ``fetch``. What does not lie in
        one piece has no place.
        """
        pays = False
        if private and self.memory is not None:
            nbytes = max([buffer.nbytes for buffer in buffers])
            pays = self.memory.pays(nbytes, alone=alone)
        if not pays and self.arena.empty:
            return None
        places: list[int] = []
        for buffer in buffers:
            where = 0 if buffer.ndim > 1 else self.arena.locate(buffer)
            if not where:
                if buffer.ndim > 1 or not pays:
                    return None
                where = _PRIVATE + address(buffer)
            places.append(where)
        return places

    @staticmethod
    def is_private(where: int) -> bool:
        """Whether a place is in a member's private memory, which the kernel checks."""
        return where >= _PRIVATE

    def fetch(self, peer: int, where: int, into: Flat, *, alone: bool = False) -> None:
        """Copy what member ``peer`` has at ``where`` into ``into``.

        ``alone``: no other member does anything in this call meanwhile.
        """
        if where < _PRIVATE:
            copy(into, self.arena.view(peer, where, into.size, into.dtype))
        elif self.memory is not None:
            self.memory.read(peer, where - _PRIVATE, into, alone=alone)
