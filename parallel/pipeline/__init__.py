"""Pipeline parallel training: each rank has some stages of a model, and microbatches pass by."""

from parallel.pipeline.actions import Action, Kind
from parallel.pipeline.module_stage import PipelineStage
from parallel.pipeline.named import (
    NamedSchedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from parallel.pipeline.schedule import PipelineSchedule
from parallel.pipeline.schedules.halves import dual_pipe_v, zbv, zero_bubble
from parallel.pipeline.schedules.whole import gpipe, interleaved_1f1b, one_f_one_b
from parallel.pipeline.simulation import Span, Timing, most_held, simulate
from parallel.pipeline.split import Part, split, split_by_cost
from parallel.pipeline.stage import Stage
from parallel.pipeline.table import Table

__all__ = [
    "Action",
    "Kind",
    "NamedSchedule",
    "Part",
    "PipelineSchedule",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "Span",
    "Stage",
    "Table",
    "Timing",
    "dual_pipe_v",
    "get_schedule_class",
    "gpipe",
    "interleaved_1f1b",
    "most_held",
    "one_f_one_b",
    "simulate",
    "split",
    "split_by_cost",
    "zbv",
    "zero_bubble",
]
