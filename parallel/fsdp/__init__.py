"""Fully sharded data parallel training: each rank stores 1/n of a model's state."""

from parallel.fsdp._clip import clip_grad_norm_
from parallel.fsdp._fully_shard import fully_shard
from parallel.fsdp._schedule import FSDPModule
from parallel.nn._precision import MixedPrecisionPolicy

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "clip_grad_norm_",
    "fully_shard",
]
