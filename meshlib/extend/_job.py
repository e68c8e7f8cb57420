"""``Job``: the calling rank's job, for libraries above meshlib."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from meshlib._groups.process_group import ProcessGroup
from meshlib._job.continuing import epochs
from meshlib._job.continuing.epochs import Change, Choose
from meshlib._job.current import current_world
from meshlib._job.membership import Epoch
from meshlib._recording.log import RankLog
from transport._operands.compression import Compression
from transport._waiting.deadline import Timeout, to_seconds


class Job:
    """The calling rank's job: its members, its groups, and the change to the next epoch.

    Create it in the rank's own thread, and pass it to threads that the rank starts: if ranks are
    threads, a new thread belongs to no rank. Raises ValueError before ``init_process_group``.

    The members of an epoch agree on the next one (``agree_on_epoch``) and begin it (``enter``).
    The next epoch omits lost ranks, and may include ranks that wait for a place.
    """

    def __init__(self) -> None:
        self._world = current_world()

    @property
    def rank(self) -> int:
        """This rank's global rank, the same in all epochs."""
        return self._world.rank

    @property
    def timeout(self) -> float:
        """The default deadline of calls, in seconds."""
        return self._world.timeout

    @property
    def log(self) -> RankLog:
        """The logger ``meshlib``, whose records have this rank's number."""
        return self._world.log

    def mark_step(self, number: int) -> None:
        """Record the end of the training step ``number`` in the flight record."""
        self._world.recorder.steps.mark(time.monotonic(), number)

    # ------------------------------------------------------------------ groups

    def groups(self) -> list[ProcessGroup]:
        """Return the groups that this rank has created, the default group first."""
        return self._world.groups()

    def new_group(
        self,
        ranks: Sequence[int],
        *,
        backend: str | None = None,
        timeout: Timeout | None = None,
        desc: str = "",
        compression: Compression | None = None,
    ) -> ProcessGroup:
        """Return a new group of ``ranks``, in this order. Only its members call this.

        Args:
            ranks: Global ranks. Members that create several groups of the same ranks must create
                them in the same order.
            backend: As in ``init_process_group``; None: the job's.
            timeout: The deadline of the group's calls; None: the job's.
            desc: The group's name in messages.
            compression: The format of large sums and averages between hosts; None: uncompressed.

        Raises:
            ValueError: If a rank is not in the current epoch or is repeated, and for an unknown
                backend.
            TypeError: For ranks that are not integers.
        """
        return self._world.registry.new_group(
            ranks, backend=backend, timeout=timeout, desc=desc, sort=False, compression=compression
        )

    # ------------------------------------------------------------------ epochs

    @property
    def epoch(self) -> Epoch:
        """The current epoch: its number and its members."""
        return self._world.membership.epoch

    @property
    def joining(self) -> bool:
        """True if this rank has no place in the job yet, and is the only member of its epoch."""
        return self._world.membership.joining

    @property
    def waiting(self) -> Sequence[int]:
        """The global ranks that wait for a place, in the order of arrival."""
        return self._world.membership.waiting

    def agree_on_epoch(
        self,
        *,
        proposal: Any = None,
        choose: Choose | None = None,
        excluded: Collection[int] = (),
        timeout: Timeout,
        wait: Timeout = 0.0,
    ) -> Change:
        """Return the next epoch, on which all remaining members of the current epoch agree.

        Every remaining member calls this. When it returns, none of them has a running call. The
        caller must then ``enter`` the epoch.

        Args:
            proposal: This rank's message to the member that chooses: JSON values.
            choose: Called as ``choose(proposals, missing)`` to return a dict, or None to wait for
                more ranks. The dict's ``members`` are the next members by place; all members agree
                on its other keys too. ``proposals`` has the proposals by rank, ``missing`` the
                causes of losses by rank. Without ``choose`` the remaining members continue.
            excluded: Global ranks that must not be members.
            timeout: The longest wait for present members.
            wait: The longest that ``choose`` may wait for more ranks.

        Raises:
            DistStoreError: On a rank that cannot reach the store.
            CollectiveTimeoutError: If the members do not agree within ``timeout``.
            DistBackendError: If ``choose`` has not chosen members after ``wait``.
        """
        return epochs.agree_on_epoch(
            self._world,
            proposal=proposal,
            choose=choose,
            excluded=excluded,
            timeout=to_seconds(timeout),
            wait=to_seconds(wait, "wait"),
        )

    def enter(self, change: Change) -> None:
        """Begin the epoch of ``change``, whose members become the default group.

        Groups end unless all their calls have ended on all members. Raises RankFailedError on a
        rank that has no place in the epoch: the rank is then a job by itself.
        """
        epochs.enter(self._world, change)

    def stand_by(self, epoch: int) -> None:
        """Leave the other members, which begin ``epoch``; this rank is then a job by itself."""
        epochs.stand_by(self._world, epoch)

    def await_place(self) -> Change | None:
        """Wait for an epoch in which this rank has a place; return the change to it.

        Returns None if the members need no more ranks (``end_joining``). Raises RankFailedError if
        all members are lost.
        """
        return epochs.await_call(self._world)

    def end_joining(self) -> None:
        """Release the ranks that wait for a place, without a place. One member calls this."""
        epochs.announce_over(self._world)
