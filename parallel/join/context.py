"""``Join``: ranks without inputs make the others' calls until all are done."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from parallel.join.attendance import Attendance, Event, global_ranks
from parallel.join.joinable import Joinable, JoinHook
from parallel.join.shadow import check_shadowable, shadow_call
from transport.call import CallHeader, Kind

_USERS_CALL = 0  # in an event; joinables are numbered from 1
_EVENT_LENGTH = 8


class Join:
    """Lets each rank loop over inputs of its own number.

        with Join([model]):
            for x, y in my_inputs:        # 10 on one rank, 12 on another
                ...

    A rank whose loop has ended stays at the end of the block and takes part in the calls of those
    that go on, without contributing, until none is left. Calls that it takes part in:

    - those of the joinables: ``DistributedDataParallel`` (also under ``no_sync``, with any
      communication hook and all options), ``ZeroRedundancyOptimizer``, or a ``Joinable`` of yours;
    - the user's own, on the joinables' group (``mesh["dp"].all_reduce(loss)``): all_reduce and
      reduce (a rank without inputs counts as zero in a sum, as infinity in a minimum …; AVG still
      divides by all), broadcast (from a rank that has inputs) and barrier.

    Before each of these, ranks tell each other in a small all-reduce who has inputs and what comes;
    that is the cost. A call on another group is not noticed: let it be one whose members run out of
    inputs together, such as ``mesh["tp"]``.

    Args:
        joinables: what communicates in the loop, all over the same group, in the same order on all
            ranks.
        enable: False makes the context do nothing, for inputs that are known to be even.
        throw_on_early_termination: instead of going on without a rank, raise RuntimeError on all
            ranks as soon as one is out of inputs.
        kwargs: passed to each joinable's ``join_hook``.

    Raises ValueError for no joinables, joinables with different groups, or one that is in another
    context.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise ValueError("joinables is empty; Join needs at least one")
        groups = [joinable.join_process_group for joinable in joinables]
        for joinable, group in zip(joinables, groups, strict=True):
            if group is not groups[0]:
                raise ValueError(
                    f"joinables must share one group: {type(joinables[0]).__name__} has "
                    f"{groups[0]}, {type(joinable).__name__} has {group}"
                )
        self._joinables = list(joinables)
        self._group = groups[0]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._kwargs = kwargs
        self._attendance = Attendance(self._group, _EVENT_LENGTH)
        self._hooks: list[JoinHook] = []
        self._announced = False
        self._leaving = ExitStack()

    @property
    def num_active(self) -> int:
        """How many ranks had inputs at the last announcement."""
        return len(self._attendance.active)

    @property
    def first_active(self) -> int:
        """The lowest group rank that had inputs at the last announcement."""
        return self._attendance.active[0]

    def __enter__(self) -> Self:
        """Begin: from now on calls are announced."""
        if not self._enable:
            return self
        for joinable in self._joinables:
            if joinable.join_context is not None:
                raise ValueError(f"this {type(joinable).__name__} is in another Join already")
        self._attendance = Attendance(self._group, _EVENT_LENGTH)
        with ExitStack() as stack:
            stack.enter_context(self._group.observed(self._on_call))
            for joinable in self._joinables:
                joinable.join_context = self
                stack.callback(setattr, joinable, "join_context", None)
            self._hooks = [joinable.join_hook(**self._kwargs) for joinable in self._joinables]
            self._leaving = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take part in the others' calls until they are done; after an error, just leave."""
        if not self._enable:
            return
        try:
            if error is None:
                self._announced = True
                self._shadow_the_others()
        finally:
            self._announced = False
            self._leaving.close()

    @staticmethod
    @contextmanager
    def notify_join_context(joinable: Joinable, phase: int = 0) -> Generator[Join | None]:
        """Announce that ``joinable`` begins ``phase``, and make its calls inside this context.

        Gives the context that it takes part in, or None, in which case nothing is done.
        """
        join = joinable.join_context
        if join is None:
            yield None
            return
        join._announce((join._joinables.index(joinable) + 1, phase, *(0,) * (_EVENT_LENGTH - 2)))
        join._announced = True
        try:
            yield join
        finally:
            join._announced = False

    # ------------------------------------------------------------------ ranks with inputs

    def _on_call(self, header: CallHeader, device: str) -> None:
        """Announce a call of the group that is about to be made, unless its phase was."""
        if self._announced:
            return
        check_shadowable(header, device, self._attendance.active, self._group)
        self._announce(_event(header))
        # Again: the source of a broadcast may have been missed just now.
        check_shadowable(header, device, self._attendance.active, self._group)

    def _announce(self, event: Event) -> None:
        self._announced = True
        try:
            self._attendance.exchange(event, self._describe)
        finally:
            self._announced = False
        self._check_all_here()

    def _check_all_here(self) -> None:
        absent = self._attendance.absent
        if self._throw and absent:
            raise RuntimeError(
                f"ranks {global_ranks(self._group, absent)} of {self._group} are out of inputs and "
                "others are not (throw_on_early_termination)"
            )

    # ------------------------------------------------------------------ ranks without

    def _shadow_the_others(self) -> None:
        last = True
        while True:
            event = self._attendance.exchange(None, self._describe)
            if event is None:
                break
            last = False
            self._check_all_here()
            if event[0] == _USERS_CALL:
                header = _header(event)
                check_shadowable(header, "cpu", self._attendance.active, self._group)
                shadow_call(header, self._group)
            else:
                self._hooks[event[0] - 1].main_hook(event[1])
        for hook in self._hooks:
            hook.post_hook(last, self.first_active)

    def _describe(self, event: Event) -> str:
        if event[0] == _USERS_CALL:
            return str(_header(event)).partition(" ")[2].partition(" ")[2]
        joinable = self._joinables[event[0] - 1]
        return f"{joinable.phase_name(event[1])} of {type(joinable).__name__}"


def _event(header: CallHeader) -> Event:
    return (
        _USERS_CALL,
        int(header.kind),
        header.elements,
        header.root,
        header.dtype,
        header.op,
        header.extra,
        0,
    )


def _header(event: Event) -> CallHeader:
    _, kind, elements, root, dtype, op, extra, _ = event
    return CallHeader(0, elements, root, Kind(kind), dtype, op, extra=extra)
