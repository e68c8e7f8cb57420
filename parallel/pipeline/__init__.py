"""Pipeline parallel training: microbatches pass through model stages on different ranks."""

from parallel._core.pipeline.named import (
    NamedSchedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleEager1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from parallel._core.pipeline.orders import (
    dual_pipe_v,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from parallel._core.pipeline.schedule import PipelineSchedule
from parallel._core.pipeline.simulation import ActionSpan, Timing, most_held, simulate
from parallel._core.pipeline.stage import Stage
from parallel._core.pipeline.table import Action, ActionKind, ScheduleTable
from parallel.pipeline._explain import draw
from parallel.pipeline._module_stage import PipelineStage, StageLayers, split, split_by_cost

__all__ = [
    "Action",
    "ActionKind",
    "ActionSpan",
    "NamedSchedule",
    "PipelineSchedule",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleEager1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleTable",
    "ScheduleZBVZeroBubble",
    "Stage",
    "StageLayers",
    "Timing",
    "draw",
    "dual_pipe_v",
    "eager_1f1b",
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
