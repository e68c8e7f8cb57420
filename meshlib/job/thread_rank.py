"""The place of a thread that is a rank of ``meshlib.testing.run_ranks``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transport.rendezvous.seats import take_turn
from transport.store.base import Store

if TYPE_CHECKING:
    from meshlib.job.world import World

ALL_HERE = "all-here"
"""The key that ends the meeting of a World's ranks: ``1``, ``lost``, or why it is in vain."""
LOST = b"lost"


@dataclass(slots=True)
class ThreadRank:
    """What a thread that is a rank of ``run_ranks`` knows, as a process does from its launcher.

    ``store`` is for all its worlds, one after the other; ``backend`` and ``timeout`` are what
    ``init_process_group`` takes where it is given none. ``provided``: ``world`` was there before
    the program began, which may initialise its own in place of it. ``jax_device``: the device for
    its programs where JAX's own would have too few threads for all ranks.
    """

    store: Store
    rank: int
    size: int
    backend: str
    timeout: float
    world: World | None = None
    provided: bool = False
    jax_device: Any = None

    def join(self, rank: int = -1, size: int = -1) -> tuple[Store, int, int]:
        """Return the store of this rank's next World, its rank and the number of ranks.

        The last two as given, unless they are -1. Raises ValueError when they do not fit.
        """
        rank, size = (self.rank if rank < 0 else rank), (self.size if size < 0 else size)
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {size - 1}, got {rank}")
        return take_turn(self.store.clone(), rank), rank, size

    def end(self, how: str) -> None:
        """Tell those who wait for this rank's next World, or will, that there is none."""
        store, rank, _ = self.join()
        store.compare_set(ALL_HERE, "", f"rank {rank} {how}")
        store.close()


class _OfThread(threading.local):
    """The place of a thread that has one; where its World is kept, ``meshlib.job.current`` says."""

    rank: ThreadRank | None = None


_current = _OfThread()


def thread_rank() -> ThreadRank | None:
    """Return what the calling thread knows as a rank of ``run_ranks``; None if it is none."""
    return _current.rank


def set_thread_rank(rank: ThreadRank | None) -> None:
    """Make the calling thread a rank; None: it is one no more."""
    _current.rank = rank
