"""``ProcessGroup``: a set of ranks, and the base of its collectives."""

from __future__ import annotations

from datetime import timedelta

from meshlib._calls.call_queue import CallQueue
from meshlib._calls.context import RankContext
from meshlib._calls.members import Members
from meshlib._collectives.collectives import Collectives
from transport._errors import DistBackendError
from transport._operands.compression import Compression
from transport._store.base import Store
from transport._waiting.deadline import Timeout


class ProcessGroup(Collectives):
    """A set of ranks, and its collectives.

    Only ``new_group``, meshes and ``init_process_group`` create groups. On a rank that is not a
    member, ``rank()`` is -1 and every call returns None.
    """

    def __init__(
        self, context: RankContext, members: Members, base: ProcessGroup | None = None
    ) -> None:
        self.id: str = members.id
        self.ranks: tuple[int, ...] = members.ranks
        """The members' global ranks; the position is the rank in the group."""
        self.global_rank: int = members.global_rank
        self.backends: dict[str, str] = members.backends
        self._members = members
        self._call_queue: CallQueue = CallQueue(
            context, members, None if base is None else base._call_queue
        )

    # ------------------------------------------------------------------ members

    @property
    def process_group(self) -> ProcessGroup:
        """The group itself."""
        return self

    def rank(self) -> int:
        """Return this rank's group rank, -1 if it is not a member."""
        return self._members.rank()

    def size(self) -> int:
        """Return the number of members, -1 on a rank that is not a member."""
        return self._members.size()

    def name(self) -> str:
        """Return the default backend's name, as c10d does."""
        return self._members.name()

    @property
    def backend(self) -> str:
        """The backends by device: ``cpu:tcp``, or ``cpu:tcp,cuda:nccl``."""
        return self._members.backend

    @property
    def compression(self) -> Compression | None:
        """The mesh's compression of large sums and averages between hosts, or None."""
        return self._members.compression

    @property
    def group_desc(self) -> str:
        """The group's purpose, for messages; callers may set it."""
        return self._members.group_desc

    @group_desc.setter
    def group_desc(self, group_desc: str) -> None:
        self._members.group_desc = group_desc

    @property
    def group_name(self) -> str:
        """The id of the group, unique in the job."""
        return self.id

    @property
    def timeout(self) -> timedelta:
        """The deadline of calls without a ``timeout`` argument."""
        return timedelta(seconds=self._members.seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the deadline of calls without a ``timeout`` argument: seconds or a timedelta.

        Raises ValueError for a negative timeout, TypeError for a value that is not a number.
        """
        self._members.set_timeout(timeout)

    def group_rank(self, global_rank: int) -> int:
        """Return the group rank of ``global_rank``; raise ValueError for a rank outside."""
        return self._members.group_rank(global_rank)

    def get_group_store(self) -> Store:
        """Return this group's own part of the job's store, for the user's keys.

        Waits on the store end when the group breaks, with ``RankFailedError`` when a member is
        lost. Raises ValueError on a rank that is not a member, and after the group was destroyed.
        """
        if self.rank() < 0:
            raise ValueError(f"rank {self.global_rank} is not a member of {self}")
        return self._call_queue.state.users_store()

    def __repr__(self) -> str:
        return repr(self._members)

    def abort(self, reason: str) -> None:
        """Break the group on all members: their calls raise ``DistBackendError`` with ``reason``.

        For a rank that cannot make a call in which the others wait. Calls inside ``jax.jit`` also
        end. Idempotent.
        """
        for queue in self._call_queue.with_derived():
            message = f"{queue} was aborted by rank {self.global_rank}: {reason}"
            queue.failure.fail_everywhere(DistBackendError(message))
            queue.failure.mark_reported()
