"""The base of the collective mixins: an object that has, or is, a process group."""

# Other files access the private attribute through ``call_queue_of``.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from meshlib._arrays.adapted import AdaptedArray
from meshlib._arrays.adapter import is_only_returned
from meshlib._arrays.ignored import warn_if_discarded
from meshlib._calls.call_queue import CallQueue
from meshlib._calls.spec import CallSpec, Run
from transport._calls.header import NO_ROOT, Kind
from transport._checks import to_whole_number
from transport._waiting.deadline import Timeout

T = TypeVar("T")

ARRAYS, LISTS = False, True
"""The forms of the members' parts in a call: one array, or a list of arrays."""
NO_MEMBER: Any = None
"""The result of a call on a rank outside the group; the type annotations omit it."""
_USUAL = frozenset((np.ndarray, list, type(None)))
"""Result types for which ``is_only_returned`` is always false."""


class GroupOfRanks:
    """Base class of objects that have, or are, a process group."""

    # Not an ABC: each call uses ``isinstance``, which is slow for an ABC.
    _call_queue: CallQueue
    """The queue of the group's calls."""

    @property
    def process_group(self) -> GroupOfRanks:
        """The group on which this object makes its calls."""
        raise NotImplementedError

    def _issue(
        self,
        kind: Kind,
        prepare: Callable[..., CallSpec],
        arguments: tuple[Any, ...],
        async_op: bool,
        timeout: Timeout | None,
        listed: bool | None = None,
    ) -> Any:
        """Issue the call that ``prepare(*arguments)`` returns; see ``CallQueue.issue``.

        Returns None on a rank outside the group. ``prepare`` raises the errors of invalid
        arguments. ``listed``: see ``FastPath.make``; None if it does not support the arguments.
        """
        call_queue = self._call_queue
        fast_path = call_queue.state.fast_path
        if fast_path is not None and listed is not None and not async_op:
            result = fast_path.make(
                kind, listed, arguments, call_queue.members.seconds if timeout is None else timeout
            )
            if result is not NotImplemented:
                return result
        if call_queue.rank < 0:
            return None
        try:  # ``CallQueue.checked`` inlined, for the time of small collectives
            spec = prepare(*arguments)
        except Exception as error:
            call_queue.failure.refuse(kind, error)
            raise
        result = call_queue.issue(spec, async_op, timeout)
        if type(result) not in _USUAL and not async_op and is_only_returned(result):
            warn_if_discarded()
        return result

    def _required(self, items: T | None, name: str, end: str) -> T:
        """Return ``items``, which are required on this rank, the call's ``end``.

        Raises ValueError for None.
        """
        if items is None:
            rank = self._call_queue.ranks[self._call_queue.rank]
            raise ValueError(f"{name} is None on the {end}, rank {rank}; expected a list")
        return items


def call_queue_of(group: GroupOfRanks) -> CallQueue:
    """Return the queue of the calls of ``group``."""
    return group._call_queue


def make_fast(
    group: GroupOfRanks,
    kind: int,
    listed: bool,
    arguments: tuple[Any, ...],
    timeout: Timeout | None = None,
) -> Any:
    """Make a common call of ``group`` in compiled code; see ``FastPath.make``.

    Returns NotImplemented for any other call, without side effects.
    """
    call_queue = group._call_queue
    fast_path = call_queue.state.fast_path
    if fast_path is None:
        return NotImplemented
    seconds = call_queue.members.seconds if timeout is None else timeout
    return fast_path.make(kind, listed, arguments, seconds)


def resolve_rank(
    group: GroupOfRanks,
    rank: int | None,
    group_rank: int | None,
    name: str,
    default: int | None = None,
) -> int:
    """Return the group rank for ``rank`` (global) or ``group_rank``.

    Without a ``default``, exactly one is required. Raises ValueError otherwise and for a rank
    outside the group, TypeError for a value that is not an integer. ``name`` is the name of the
    argument ``rank``, ``src`` or ``dst``; the other one is ``group_`` with that name.
    """
    members = group._call_queue.members
    if type(rank) is int and group_rank is None:  # the common case first
        place = members.place_of(rank)
        if place is not None:
            return place
    if rank is None and group_rank is None and default is not None:
        return default
    if (rank is None) == (group_rank is None):
        got = f"{name}={rank}, group_{name}={group_rank}"
        raise ValueError(f"exactly one of {name} and group_{name} is expected, got {got}")
    if rank is not None:
        try:
            return members.group_rank(to_whole_number(rank, name))
        except ValueError as error:
            meant = f"; write group_{name}={rank} for a rank in the group"
            hint = meant if 0 <= rank < len(members.ranks) else ""
            raise ValueError(f"{name}: {error}{hint}") from None
    place = to_whole_number(group_rank, f"group_{name}")
    if not 0 <= place < len(members.ranks):
        raise ValueError(
            f"group_{name} is {place}; expected 0 to {len(members.ranks) - 1} in {members}"
        )
    return place


def spec_of(
    kind: Kind,
    run: Run,
    like: AdaptedArray,
    dtype: int,
    *,
    elements: int = 0,
    root: int = NO_ROOT,
    op: int = 0,
    extra: int = 0,
    nbytes: int | None = None,
) -> CallSpec:
    """Return the call ``run`` on arrays with the item size and the device of ``like``.

    ``dtype`` is the code of the dtype; ``nbytes`` is by default the size of ``elements``.
    """
    if nbytes is None:
        nbytes = elements * like.flat.itemsize
    return CallSpec(kind, run, elements, root, dtype, op, extra, nbytes, like.device)
