"""``Join``: ranks that are out of inputs shadow the other ranks' collectives until all are done."""

from __future__ import annotations

import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, Self

import numpy as np

from meshlib import ProcessGroup
from meshlib.extend import CallHeader, Job, Kind, Members, Run, observe
from parallel._checks import check_instance, describe
from parallel._groups import GroupLike, gathered, resolve
from parallel.join._shadow import among_active, check_shadowable, shadow_call


class JoinHook:
    """The collectives of a rank without inputs, for one joinable."""

    def main_hook(self, phase: int) -> None:
        """Make the collectives that the joinable makes in ``phase`` on other ranks."""

    def post_hook(self, is_last_joiner: bool, source: int) -> None:
        """Synchronise the ranks after all are out of inputs; called on every rank.

        ``is_last_joiner`` is True if this rank had inputs at the last announced phase. ``source``
        is a group rank with inputs at that phase, the same on all ranks.
        """


def _nothing(*_: object) -> None:
    pass


class FunctionsHook(JoinHook):
    """A hook whose ``main_hook`` and ``post_hook`` are the given functions."""

    def __init__(
        self,
        main: Callable[[int], object] = _nothing,
        post: Callable[[bool, int], object] = _nothing,
    ) -> None:
        self._main = main
        self._post = post

    def main_hook(self, phase: int) -> None:
        self._main(phase)

    def post_hook(self, is_last_joiner: bool, source: int) -> None:
        self._post(is_last_joiner, source)


class Joinable(ABC):
    """An object that makes collectives in each step, and announces them to ``Join``.

    Its methods group the collectives into phases:

        with Join.notify_join_context(self, phase):
            ...  # exactly the collectives of ``main_hook(phase)``
    """

    join_context: Join | None = None
    """The current ``Join`` context of this object, if any."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The group over which this object communicates."""

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one context; ``kwargs`` are those of ``Join``."""

    def phase_name(self, phase: int) -> str:
        """Return the name of a phase in messages."""
        return f"phase {phase}"


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class OptimizerReplica(Joinable):
    """Copies an optimizer's state to ranks that ran out of inputs early.

    These ranks take fewer steps, so their momenta, and later their replicas, would differ. After
    all ranks are out of inputs, one that took all steps broadcasts its state. ``process_group`` is
    the wrapped model's.

    Raises TypeError for an ``optimizer`` without ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, optimizer: _Stateful, process_group: GroupLike | None = None) -> None:
        if not (hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")):
            raise TypeError(
                f"optimizer must have state_dict() and load_state_dict(), got {describe(optimizer)}"
            )
        self._optimizer = optimizer
        self._group = resolve(process_group, "process_group")

    @property
    def join_process_group(self) -> ProcessGroup:
        return self._group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return FunctionsHook(post=self._copy_state)

    def _copy_state(self, is_last_joiner: bool, source: int) -> None:
        is_source = source == self._group.rank()
        state: list[Any] = [self._optimizer.state_dict() if is_source else None]
        self._group.broadcast_object_list(state, group_src=source)
        if not is_last_joiner:
            self._optimizer.load_state_dict(state[0])


Event = tuple[int, ...]
"""An announcement of the next call: a few integers, equal on all announcing ranks."""


class Attendance:
    """Keeps the ranks of ``group`` that are out of inputs in step with the active ranks.

    All ranks call ``exchange``, a small all-reduce, before each call that all must make. It sums
    each announcement x and also x²: the n values are equal if and only if n Σx² = (Σx)².
    """

    def __init__(self, group: ProcessGroup, length: int) -> None:
        self._group = group
        self._length = length
        self.active = list(range(group.size()))
        """The group ranks with inputs at the last exchange in which any rank had inputs."""

    def exchange(self, event: Event | None, describe: Callable[[Event], str]) -> Event | None:
        """Return the announcement of the ranks with inputs, or None if all are out of inputs.

        ``event`` is this rank's announcement, or None if it is out of inputs. If announcements
        differ, all ranks raise RuntimeError with a table of them.
        """
        row = np.array(event or (0,) * self._length, np.int64)
        totals = np.concatenate([[np.int64(event is not None)], row, row * row])
        self._group.all_reduce(totals)
        count = int(totals[0])
        if not count:
            return None
        sums, squares = totals[1 : 1 + self._length], totals[1 + self._length :]
        if count != len(self.active):
            self.active: list[int] = self._find_active(event is not None)
        if not np.array_equal(squares * count, sums * sums):
            raise RuntimeError(self._differences(event, describe))
        return tuple((sums // count).tolist())

    @property
    def absent(self) -> list[int]:
        """The group ranks that were out of inputs at the last exchange."""
        return [rank for rank in range(self._group.size()) if rank not in self.active]

    def _find_active(self, is_active: bool) -> list[int]:
        flags = np.empty(self._group.size(), np.uint8)
        self._group.all_gather_into_tensor(flags, np.array([is_active], np.uint8))
        return np.flatnonzero(flags).tolist()

    def _differences(self, event: Event | None, describe: Callable[[Event], str]) -> str:
        own = "is out of inputs" if event is None else f"begins {describe(event)}"
        texts = gathered(own, self._group)
        rows = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
        return "\n".join([f"the ranks of {self._group} make different calls inside Join:", *rows])


def global_ranks(group: ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Return the global ranks of group ranks."""
    return [group.ranks[rank] for rank in ranks]


_USERS_CALL = 0  # the first integer of an event; joinables are numbered from 1
_EVENT_LENGTH = 8
_OWN_GROUP = 0  # the last integer of a call's event; for another group, its tag


class Join:
    """A context in which ranks may loop over different numbers of inputs.

        with Join([model]):
            for x, y in my_inputs:        # 10 on one rank, 12 on another
                ...

    A rank whose loop has ended waits at the end of the block for the other ranks' loops. Meanwhile
    it participates in their calls without contributing. These calls may be:

    - those of the joinables: ``DistributedDataParallel`` (also inside ``no_sync``, with any
      communication hook and all options), ``ZeroRedundancyOptimizer``, or your own ``Joinable``;
    - your own ``all_reduce``, ``reduce``, ``broadcast`` and ``barrier``, on the joinables' group
      (``mesh["dp"].all_reduce(loss)``) or a group that contains it (the whole mesh).

    In a reduction, a rank without inputs contributes the neutral element, such as zero in a sum; an
    average excludes it. The source of a broadcast must have inputs.

    The cost is a small all-reduce before each call, in which the ranks with inputs announce it.
    Calls on a group with no other rank of the joinables' group, such as ``mesh["tp"]``, are not
    announced; its members must run out of inputs together. A call on a group with only some of the
    joinables' ranks raises RuntimeError, and so does a call from another thread (inside
    ``jax.jit``).

    Args:
        joinables: The objects that communicate in the loop, all over the same group, in the same
            order on all ranks.
        enable: False makes the context do nothing, for inputs that are known to be even.
        throw_on_early_termination: Raise RuntimeError on all ranks as soon as one is out of inputs,
            instead of continuing without it.
        kwargs: Arguments for each joinable's ``join_hook``.

    Raises ValueError for an empty list, or joinables with different groups, and TypeError for an
    object that is not a ``Joinable``. Raises RuntimeError for calls that cannot be announced (see
    above), and on all ranks if ranks make different calls.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(joinables, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"joinables must be a list, such as [model], got {describe(joinables)}")
        if not joinables:
            raise ValueError("joinables is empty; expected at least one")
        for i, joinable in enumerate(joinables):
            check_instance(joinable, Joinable, f"joinables[{i}]")
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
        self._thread = 0
        self._on_exit = ExitStack()

    @property
    def num_active(self) -> int:
        """The number of ranks with inputs at the last announcement."""
        return len(self._attendance.active)

    @property
    def first_active(self) -> int:
        """The lowest group rank that had inputs at the last announcement."""
        return self._attendance.active[0]

    def active_in(self, group: ProcessGroup) -> list[int]:
        """Return the ranks in ``group`` that had inputs at the last announcement.

        All members of ``group`` must be ranks of this context.
        """
        active = set(global_ranks(self._group, self._attendance.active))
        return [place for place, rank in enumerate(group.ranks) if rank in active]

    def __enter__(self) -> Self:
        """Start announcing calls.

        Raises ValueError for a joinable that is in another context, RuntimeError for a group whose
        calls are observed already, TypeError if a ``join_hook`` does not return a ``JoinHook``.
        """
        if not self._enable:
            return self
        for joinable in self._joinables:
            if joinable.join_context is not None:
                raise ValueError(f"this {type(joinable).__name__} is in another Join already")
        self._attendance = Attendance(self._group, _EVENT_LENGTH)
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            stack.enter_context(observe(self._group, self._on_call))
            for joinable in self._joinables:
                joinable.join_context = self
                stack.callback(setattr, joinable, "join_context", None)
            self._hooks = [joinable.join_hook(**self._kwargs) for joinable in self._joinables]
            for joinable, hook in zip(self._joinables, self._hooks, strict=True):
                check_instance(hook, JoinHook, f"the result of {type(joinable).__name__}.join_hook")
            self._on_exit = stack.pop_all()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Shadow the other ranks' calls until all are out of inputs, unless an error occurred."""
        if not self._enable:
            return
        try:
            if error is None:
                self._announced = True
                self._shadow_others()
        finally:
            self._announced = False
            self._on_exit.close()

    @staticmethod
    @contextmanager
    def notify_join_context(joinable: Joinable, phase: int = 0) -> Generator[Join | None]:
        """Announce ``phase`` of ``joinable``, whose calls must be inside this context.

        Yields the joinable's ``Join`` context. Without one, announces nothing and yields None.
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

    def _on_call(self, group: Members, header: CallHeader, device: str, run: Run) -> Run:
        """Announce the next call, if it needs other ranks, and return the function to run.

        Calls in a phase are not announced, because the phase itself was.
        """
        if self._announced:
            return run
        lacking = sorted(set(self._group.ranks) - set(group.ranks))
        if len(lacking) == self._group.size() - 1:
            return run
        what = f"{Kind(header.kind).name.lower()} on {group} inside Join"
        if lacking:
            raise RuntimeError(
                f"{what}: the group has some ranks of {self._group}, but not {lacking}, so the "
                "call cannot be announced to ranks that are out of inputs. Use a group with all "
                "of these ranks, or only with this one"
            )
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"{what}: calls from another thread than the loop's (as inside jax.jit) cannot be "
                "announced to ranks that are out of inputs. Make the call in the loop"
            )
        self._check_shadowable(group, header, device)
        self._announce(self._event(group, header))
        # Checked again, because the announcement may show that a broadcast's source has left.
        self._check_shadowable(group, header, device)
        return among_active(run, header, self._group.size() / self.num_active)

    def _check_shadowable(
        self, group: Members | ProcessGroup, header: CallHeader, device: str
    ) -> None:
        absent = global_ranks(self._group, self._attendance.absent)
        active = [place for place, rank in enumerate(group.ranks) if rank not in absent]
        check_shadowable(header, device, active, group)

    def _announce(self, event: Event) -> None:
        self._announced = True
        try:
            self._attendance.exchange(event, self._describe)
        finally:
            self._announced = False
        self._check_early_termination()

    def _check_early_termination(self) -> None:
        absent = self._attendance.absent
        if self._throw and absent:
            raise RuntimeError(
                f"ranks {global_ranks(self._group, absent)} of {self._group} are out of inputs, "
                "but others are not (throw_on_early_termination)"
            )

    # ------------------------------------------------------------------ ranks without inputs

    def _shadow_others(self) -> None:
        last = True
        while True:
            event = self._attendance.exchange(None, self._describe)
            if event is None:
                break
            last = False
            self._check_early_termination()
            if event[0] == _USERS_CALL:
                group, header = self._group_of(event), _header(event)
                self._check_shadowable(group, header, "cpu")
                shadow_call(header, group)
            else:
                self._hooks[event[0] - 1].main_hook(event[1])
        for hook in self._hooks:
            hook.post_hook(last, self.first_active)

    def _describe(self, event: Event) -> str:
        if event[0] == _USERS_CALL:
            text = str(_header(event)).partition(" ")[2].partition(" ")[2]
            return text if event[-1] == _OWN_GROUP else f"{text} on {self._group_of(event)}"
        joinable = self._joinables[event[0] - 1]
        return f"{joinable.phase_name(event[1])} of {type(joinable).__name__}"

    def _event(self, group: Members, header: CallHeader) -> Event:
        return (
            _USERS_CALL,
            int(header.kind),
            header.elements,
            header.root,
            header.dtype,
            header.op,
            header.extra,
            _OWN_GROUP if group.id == self._group.id else _tag(group),
        )

    def _group_of(self, event: Event) -> ProcessGroup:
        """Return the group of a user's call."""
        if event[-1] == _OWN_GROUP:
            return self._group
        for group in Job().groups():
            if _tag(group) == event[-1]:
                return group
        raise RuntimeError(
            f"inside Join, ranks {global_ranks(self._group, self._attendance.active)} call "
            f"{Kind(event[1]).name.lower()} on a group that rank {self._group.global_rank}, "
            "which is out of inputs, has not used before. Make a call on that group before the loop"
        )


def _tag(group: Members | ProcessGroup) -> int:
    """Return a number that identifies ``group`` on all its members; its square fits 64 bits."""
    return zlib.crc32(group.id.encode()) % (1 << 24) + 1


def _header(event: Event) -> CallHeader:
    _, kind, elements, root, dtype, op, extra, _ = event
    return CallHeader(0, elements, root, Kind(kind), dtype, op, extra=extra)
