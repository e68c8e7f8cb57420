"""``Job``: the calling rank's job, as libraries on top of meshlib see it."""

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
    """The calling rank's job: its members, its groups, and the way from one epoch to the next.

    Threads that the rank starts use the object that its own thread has made: where ranks are
    threads, a new thread belongs to none. Raises ValueError before ``init_process_group``.

    A job has epochs. The members of one agree on the next (``agree_on_epoch``) and begin it
    (``enter``): ranks that were lost are left out, ranks that wait for a place may get one.
    """

    def __init__(self) -> None:
        self._world = current_world()

    @property
    def rank(self) -> int:
        """This rank's global rank, the same in all epochs."""
        return self._world.rank

    @property
    def timeout(self) -> float:
        """The deadline of calls on groups without one of their own, in seconds."""
        return self._world.timeout

    @property
    def log(self) -> RankLog:
        """The logger ``meshlib``, whose records have this rank's number."""
        return self._world.log

    def mark_step(self, number: int) -> None:
        """Note in the flight record that the step ``number`` of the training has just ended."""
        self._world.recorder.steps.mark(time.monotonic(), number)

    # ------------------------------------------------------------------ groups

    def groups(self) -> list[ProcessGroup]:
        """Return the groups that this rank has made, the default group first."""
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
        """Return a new group of ``ranks``, in this order, which its members alone make.

        Args:
            ranks: Global ranks. The members of a group make those of the same ranks in the same
                order.
            backend: As in ``init_process_group``; None: the job's.
            timeout: The deadline of its calls; None: the job's.
            desc: Its name in messages.
            compression: The format of large sums and averages between hosts; None: uncompressed.

        Raises:
            ValueError: For ranks that are not in the present epoch, or there twice, and for an
                unknown backend.
            TypeError: For ranks that are not integers.
        """
        return self._world.registry.new_group(
            ranks, backend=backend, timeout=timeout, desc=desc, sort=False, compression=compression
        )

    # ------------------------------------------------------------------ epochs

    @property
    def epoch(self) -> Epoch:
        """The present epoch: its number and its members."""
        return self._world.membership.epoch

    @property
    def joining(self) -> bool:
        """True if this rank has no place among the others yet, and is its epoch's only member."""
        return self._world.membership.joining

    @property
    def waiting(self) -> Sequence[int]:
        """The global ranks that wait for a place, in the order in which they came."""
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
        """Return the next epoch, on which all remaining members of this one agree.

        Every one of them calls; no call of theirs is under way any more when this returns. It is
        then for the caller to ``enter`` the epoch.

        Args:
            said: This rank's message to the choosing member: values of JSON.
            choose: Called as ``choose(proposals, missing)``; None: the remaining members go on. It
                returns a dict: ``members`` has the next members by place, other keys are agreed on
                as well. It may return None to wait for more ranks. ``proposals`` has the values by
                rank. ``missing`` says by rank why it is lost.
            excluded: Global ranks that are to have no place.
            timeout: The longest that members which are there are waited for.
            wait: The longest that ``choose`` may wait for more ranks.

        Raises:
            DistStoreError: On a rank that is cut off from the store.
            CollectiveTimeoutError: When nothing was agreed on in ``timeout``.
            DistBackendError: When ``choose`` had found no members after ``wait``.
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
        """Begin the epoch of ``change``: its members are the default group.

        Groups end, except for those whose calls have all ended on all members. Raises
        RankFailedError
        on a rank that has no place in it: it is a job of its own from then on.
        """
        epochs.enter(self._world, change)

    def stand_by(self, epoch: int) -> None:
        """Leave the others, who begin ``epoch``: this rank is a job of its own."""
        epochs.stand_by(self._world, epoch)

    def await_place(self) -> Change | None:
        """Wait, as long as the others go on, for an epoch in which this rank has a place.

        Returns None when they need no more ranks (``end_joining``). Raises RankFailedError when all
        of them are lost.
        """
        return epochs.await_call(self._world)

    def end_joining(self) -> None:
        """Tell the ranks that wait for a place, once for all members, that they get none."""
        epochs.announce_over(self._world)
