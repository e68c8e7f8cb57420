"""Named schedules, with torch's names where torch has the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from parallel._checks import check_instance, to_count
from parallel._core.pipeline.orders import (
    dual_pipe_v,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from parallel._core.pipeline.schedule import PipelineSchedule, as_stages
from parallel._core.pipeline.stage import Stage
from parallel._core.pipeline.table import ScheduleTable
from parallel._core.replicas import raise_on_all_ranks


class NamedSchedule(PipelineSchedule):
    """A schedule whose table follows from the ranks, the stages and the microbatches.

    Args:
        stages: This rank's stage, or a list of its stages.
        n_microbatches: The number of parts into which a batch is cut.
        loss_fn: The loss of the last stage's output and the target: a ``parallel.nn`` module for
            stages of modules. The same on all ranks. None: ``step`` runs only forwards.
        scale_grads: Divide the gradients by the number of microbatches, which is correct for a
            loss that is a mean.

    Raises:
        TypeError: For arguments of another type.
        ValueError: On all ranks, if the number of stages is not divisible by the number of ranks,
            for an impossible number of microbatches, or if the ranks' arguments differ. Also if a
            rank has the wrong stages for the schedule.
    """

    def __init__(
        self,
        stages: Stage | Sequence[Stage],
        n_microbatches: int,
        loss_fn: Any = None,
        *,
        scale_grads: bool = True,
    ) -> None:
        listed = as_stages(stages)
        count = to_count(n_microbatches, "n_microbatches")
        group, total = listed[0].group, listed[0].num_stages
        each, rest = divmod(total, group.size())
        with raise_on_all_ranks(group):
            if rest or not each:
                raise ValueError(
                    f"num_stages is {total}, which is not divisible by the {group.size()} ranks of"
                    f" {group}"
                )
            table = self.make_table(group.size(), count, each)
        super().__init__(listed, table, loss_fn, scale_grads=scale_grads)

    stages_per_rank: ClassVar[int | None]
    """The number of stages on each rank; None: any number."""
    _make: ClassVar[Callable[..., ScheduleTable]]

    def __init_subclass__(
        cls, make: Callable[..., ScheduleTable] | None = None, each: int | None = None
    ) -> None:
        """Set the function ``make`` and the number of stages on ``each`` rank.

        ``make`` returns the table for numbers of ranks, microbatches and, if ``each`` is None,
        stages on each rank.
        """
        if make is not None:
            cls._make, cls.stages_per_rank = staticmethod(make), each

    @classmethod
    def make_table(cls, ranks: int, microbatches: int, stages_per_rank: int) -> ScheduleTable:
        """Return the table; raise ValueError if these numbers are not possible."""
        if cls.stages_per_rank is None:
            return cls._make(ranks, microbatches, stages_per_rank)
        table = cls._make(ranks, microbatches)
        if stages_per_rank != cls.stages_per_rank:
            has = "one stage" if cls.stages_per_rank == 1 else "two stages"
            raise ValueError(f"{table.name} has {has} per rank, got {stages_per_rank}")
        return table


class ScheduleGPipe(NamedSchedule, make=gpipe, each=1):
    """GPipe: all forwards, then all backwards. One stage per rank. See ``gpipe``."""


class Schedule1F1B(NamedSchedule, make=one_f_one_b, each=1):
    """1F1B: alternating forwards and backwards. One stage per rank. See ``one_f_one_b``."""


class ScheduleEager1F1B(NamedSchedule, make=eager_1f1b, each=1):
    """1F1B with more time for messages to arrive. One stage per rank. See ``eager_1f1b``."""


class ScheduleInterleaved1F1B(NamedSchedule, make=interleaved_1f1b):
    """1F1B with several stages per rank: rank r has r, r+p, ... See ``interleaved_1f1b``."""


class ScheduleInterleavedZeroBubble(NamedSchedule, make=zero_bubble):
    """ZB-H1, with one or more stages per rank: rank r has r, r+p, ... See ``zero_bubble``."""


class ScheduleZBVZeroBubble(NamedSchedule, make=zbv, each=2):
    """ZB-V: rank r has stages r and 2p-1-r. See ``zbv``."""


class ScheduleDualPipeV(NamedSchedule, make=dual_pipe_v, each=2):
    """DualPipeV: rank r has stages r and 2p-1-r. See ``dual_pipe_v``."""


_CLASSES: dict[str, type[NamedSchedule]] = {
    cls.__name__.removeprefix("Schedule"): cls for cls in NamedSchedule.__subclasses__()
}


def get_schedule_class(schedule_name: str) -> type[NamedSchedule]:
    """Return the class of a schedule, such as ``"1F1B"`` or ``"Schedule1F1B"``.

    Args:
        schedule_name: GPipe, 1F1B, Eager1F1B, Interleaved1F1B, InterleavedZeroBubble (ZB-H1 with
            one stage per rank), ZBVZeroBubble or DualPipeV, in any case.

    Returns:
        The class.

    Raises:
        ValueError: For another name.
        TypeError: For a value that is not a string.
    """
    check_instance(schedule_name, str, "schedule_name", "'1F1B'")
    folded = {name.casefold(): cls for name, cls in _CLASSES.items()}
    found = folded.get(schedule_name.casefold().removeprefix("schedule"))
    if found is None:
        raise ValueError(
            f"schedule_name is {schedule_name!r}; expected one of {', '.join(_CLASSES)}"
        )
    return found
