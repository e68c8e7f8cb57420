"""Where a member's data lies that others read there, without its being staged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
        self._arena = arena

    def are_possible(self, nbytes: int) -> bool:
        """Whether ``locate`` may find a place for a part of a transfer of ``nbytes``."""
        return not self._arena.empty or (self.memory is not None and self.memory.pays(nbytes))

    def are_symmetric(self, buffers: Sequence[Flat]) -> bool:
        """Whether all of them lie in symmetric memory."""
        return not self._arena.empty and all(
            buffer.ndim == 1 and self._arena.locate(buffer) for buffer in buffers
        )

    def locate(self, buffer: Flat, nbytes: int | None = None, *, alone: bool = False) -> int:
        """Return the place of ``buffer``, which is part of a transfer of ``nbytes`` (None: all).

        ``alone``: as in ``fetch``. What does not lie in one piece has none.
        """
        if buffer.ndim > 1:
            return 0
        where = self._arena.locate(buffer)
        size = buffer.nbytes if nbytes is None else nbytes
        if not where and self.memory is not None and self.memory.pays(size, alone=alone):
            where = _PRIVATE + address(buffer)
        return where

    def fetch(self, peer: int, where: int, into: Flat, *, alone: bool = False) -> None:
        """Copy what member ``peer`` has at ``where`` into ``into``.

        ``alone``: no other member does anything in this call meanwhile.
        """
        if not into.size:
            return
        if into.ndim > 1:
            room = np.empty(into.size, into.dtype)
            self.fetch(peer, where, room, alone=alone)
            into[...] = room.reshape(into.shape)
            return
        if where < _PRIVATE:
            copy(into, self._arena.view(peer, where, into.size, into.dtype))
        elif self.memory is not None:
            self.memory.read(peer, where - _PRIVATE, into, alone=alone)
