"""The settings of a thread that is a rank of ``meshlib.testing.run_ranks``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from meshlib._job.meeting import call_off
from meshlib._job.world import Current, World
from transport._rendezvous.rank_claims import next_job_part
from transport._store.base import Store


@dataclass(slots=True)
class ThreadRank:
    """The settings of a thread that is a rank of ``run_ranks``, like a launcher's for a process.

    ``store`` serves all Worlds of the thread, one after the other. ``backend`` and ``timeout`` are
    the defaults of ``init_process_group``.

    A ``provided`` World was created before the program began; the program may replace it. The
    programs run on ``jax_device`` if JAX's default device has too few threads for all ranks.
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
        """Return the store, the rank and the number of ranks of this thread's next World.

        ``rank`` and ``size`` default to this thread's if they are -1. Raises ValueError unless the
        rank is below the number of ranks.
        """
        rank, size = (self.rank if rank < 0 else rank), (self.size if size < 0 else size)
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {size - 1}, got {rank}")
        return next_job_part(self.store.clone(), rank), rank, size

    def end(self, how: str) -> None:
        """End the other ranks' waits for this rank's next World, which will not be created."""
        store, rank, _ = self.join()
        call_off(store, f"rank {rank} {how}")
        store.close()


class _OfThread(threading.local):
    """The settings of a thread that is a rank."""

    rank: ThreadRank | None = None


_current = _OfThread()


def thread_rank() -> ThreadRank | None:
    """Return the settings of the calling thread if it is a rank of ``run_ranks``, or None."""
    return _current.rank


def set_thread_rank(rank: ThreadRank | None) -> None:
    """Make the calling thread the rank ``rank``, or no rank if it is None."""
    Current.in_threads, _current.rank = True, rank
