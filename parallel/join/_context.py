"""``Join``: ranks without inputs make the others' calls until all are done."""

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
    """The calls of a rank without inputs on behalf of one joinable."""

    def main_hook(self, phase: int) -> None:
        """Make the collectives that the joinable makes, on the others, in ``phase``."""

    def post_hook(self, is_last_joiner: bool, source: int) -> None:
        """Bring the ranks together again, once all are out of inputs; called on every rank.

        ``is_last_joiner`` says whether this rank still had inputs at the last announced phase;
        ``source`` is a group rank, the same on all ranks, for which that is true.
        """


def _nothing(*_: object) -> None:
    pass


class FunctionsHook(JoinHook):
    """The hook that is made of two functions, which are its ``main_hook`` and ``post_hook``."""

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
    """Something that makes collectives in each step, and tells ``Join`` before it does.

    Its methods put the collectives into phases:

        with Join.notify_join_context(self, phase):
            ...  # all calls in here are those that ``main_hook(phase)`` makes
    """

    join_context: Join | None = None
    """The context that it takes part in at the moment."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The group over which it communicates."""

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one context; ``kwargs`` are the ones that ``Join`` was given."""

    def phase_name(self, phase: int) -> str:
        """Return the name of a phase in messages."""
        return f"phase {phase}"


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class OptimizerReplica(Joinable):
    """Gives ``optimizer``, on ranks that ran out of inputs, the state of one that did not.

    Such a rank takes fewer steps: its momenta would differ from then on, and the replicas with
    them. Once all are out of inputs the state is broadcast. ``process_group`` is that of the
    wrapped model.

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
        mine = source == self._group.rank()
        state: list[Any] = [self._optimizer.state_dict() if mine else None]
        self._group.broadcast_object_list(state, group_src=source)
        if not is_last_joiner:
            self._optimizer.load_state_dict(state[0])


Event = tuple[int, ...]
"""An announcement of the next call: a few integers, equal on all ranks that announce."""


class Attendance:
    """Keeps the ranks of ``group`` without inputs in step with those that still have some.

    All ranks call ``exchange``, a small all-reduce, before each call that all must make. It sums
    each announcement x and also x², to find out whether the n values are equal: n Σx² = (Σx)²
    holds only then.
    """

    def __init__(self, group: ProcessGroup, length: int) -> None:
        self._group = group
        self._length = length
        self.active = list(range(group.size()))
        """Group ranks with inputs, as of the last exchange in which there were any."""

    def exchange(self, event: Event | None, describe: Callable[[Event], str]) -> Event | None:
        """Return the announcement of the ranks with inputs, or None if no rank has any left.

        ``event`` is this rank's announcement, None if it has no inputs left. If announcements
        differ, raises RuntimeError on all ranks, with a table of them.
        """
        row = np.array(event or (0,) * self._length, np.int64)
        totals = np.concatenate([[np.int64(event is not None)], row, row * row])
        self._group.all_reduce(totals)
        count = int(totals[0])
        if not count:
            return None
        sums, squares = totals[1 : 1 + self._length], totals[1 + self._length :]
        if count != len(self.active):
            self.active: list[int] = self._attending(event is not None)
        if not np.array_equal(squares * count, sums * sums):
            raise RuntimeError(self._differences(event, describe))
        return tuple((sums // count).tolist())

    @property
    def absent(self) -> list[int]:
        """Group ranks that were out of inputs at the last exchange."""
        return [rank for rank in range(self._group.size()) if rank not in self.active]

    def _attending(self, here: bool) -> list[int]:
        flags = np.empty(self._group.size(), np.uint8)
        self._group.all_gather_into_tensor(flags, np.array([here], np.uint8))
        return np.flatnonzero(flags).tolist()

    def _differences(self, event: Event | None, describe: Callable[[Event], str]) -> str:
        own = "is out of inputs" if event is None else f"begins {describe(event)}"
        said = gathered(own, self._group)
        rows = [f"  rank {rank}: {text}" for rank, text in enumerate(said)]
        return "\n".join([f"inside Join the ranks of {self._group} do not do the same:", *rows])


def global_ranks(group: ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Return the global ranks of group ranks."""
    return [group.ranks[rank] for rank in ranks]


_USERS_CALL = 0  # in an event; joinables are numbered from 1
_EVENT_LENGTH = 8
_OWN_GROUP = 0  # at the end of a call's event; else what stands for the group


class Join:
    """Lets ranks loop over different numbers of inputs.

        with Join([model]):
            for x, y in my_inputs:        # 10 on one rank, 12 on another
                ...

    A rank whose loop has ended waits at the end of the block until all loops have. Meanwhile it
    takes part in the other ranks' calls without contributing. These calls may be:

    - those of the joinables: ``DistributedDataParallel`` (also under ``no_sync``, with any
      communication hook and all options), ``ZeroRedundancyOptimizer``, or a ``Joinable`` of yours;
    - ``all_reduce``, ``reduce``, ``broadcast`` and ``barrier`` of your own, on the joinables' group
      (``mesh["dp"].all_reduce(loss)``) or another that has all its ranks (the whole mesh).

    In a reduction, a rank without inputs counts as zero in a sum, as infinity in a minimum, and so
    on; an average leaves it out. A broadcast must come from a rank with inputs.

    The cost is a small all-reduce before each call, in which the ranks with inputs announce it.
    Calls on a group with no other rank of the joinables' group, such as ``mesh["tp"]``, are not
    announced; its members must run out of inputs together. A call on a group with only some of the
    joinables' ranks raises RuntimeError, as does one from another thread (inside ``jax.jit``).

    Args:
        joinables: The objects that communicate in the loop, all over the same group, in the same
            order on all ranks.
        enable: False makes the context do nothing, for inputs that are known to be even.
        throw_on_early_termination: Raise RuntimeError on all ranks as soon as one is out of inputs,
            instead of going on without it.
        kwargs: Passed to each joinable's ``join_hook``.

    Raises ValueError for no joinables, or joinables with different groups, and TypeError for an
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
            raise ValueError("joinables is empty; Join needs at least one")
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
        self._leaving = ExitStack()

    @property
    def num_active(self) -> int:
        """The number of ranks with inputs at the last announcement."""
        return len(self._attendance.active)

    @property
    def first_active(self) -> int:
        """The lowest group rank that had inputs at the last announcement."""
        return self._attendance.active[0]

    def active_in(self, group: ProcessGroup) -> list[int]:
        """Return the group ranks in ``group`` that had inputs at the last announcement.

        All its ranks are among the context's own.
        """
        active = set(global_ranks(self._group, self._attendance.active))
        return [place for place, rank in enumerate(group.ranks) if rank in active]

    def __enter__(self) -> Self:
        """Begin: from now on calls are announced.

        Raises ValueError for a joinable that is in another context, RuntimeError for a group whose
        calls somebody observes already, TypeError for a ``join_hook`` that returns something else.
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
                check_instance(hook, JoinHook, f"what {type(joinable).__name__}.join_hook returns")
            self._leaving = stack.pop_all()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
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

    def _on_call(self, group: Members, header: CallHeader, device: str, run: Run) -> Run:
        """Announce a call that is about to be made, if it needs other ranks. Return the function
        to run.

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
                f"{what}: the group has some ranks of {self._group}, but not {lacking}, so they "
                "cannot be told what to do when they are out of inputs. Use a group with all of "
                "them, or none but this one"
            )
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"{what}: it comes from another thread than the loop's (inside jax.jit it always "
                "does), so ranks that are out of inputs cannot know when. Make it in the loop"
            )
        self._check_shadowable(group, header, device)
        self._announce(self._event(group, header))
        # Again: the source of a broadcast may have been missed just now.
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
        """Return the group of a call of the user's."""
        if event[-1] == _OWN_GROUP:
            return self._group
        for group in Job().groups():
            if _tag(group) == event[-1]:
                return group
        raise RuntimeError(
            f"inside Join, ranks {global_ranks(self._group, self._attendance.active)} call "
            f"{Kind(event[1]).name.lower()} on a group that rank {self._group.global_rank} "
            "has not used so far; it is out of inputs and has to take part. Make a call on that "
            "group before the loop"
        )


def _tag(group: Members | ProcessGroup) -> int:
    """Return a number that stands for ``group`` on all its members; its square fits 64 bits."""
    return zlib.crc32(group.id.encode()) % (1 << 24) + 1


def _header(event: Event) -> CallHeader:
    _, kind, elements, root, dtype, op, extra, _ = event
    return CallHeader(0, elements, root, Kind(kind), dtype, op, extra=extra)
