"""How a stage is split over the dims of the mesh, except for pp: tp first, then cp, then
dp_shard."""

from __future__ import annotations

from fnmatch import fnmatchcase

from meshlib.sharding import Replicate, Shard
from numpy_gpt.config import Config
from numpy_gpt.dims import Dims
from parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    nn,
    parallelize,
)
from parallel.context import context_parallel
from parallel.expert import MoE
from parallel.nn import Parameter
from parallel.pipeline import StageLayers


def split_stage(stage: StageLayers, config: Config, dims: Dims) -> StageLayers:
    """Split a whole stage, in place, and return it: what one process has, on all dims but pp."""
    if dims.sizes.tp > 1:
        for plan in plans(stage, sequence=config.parallel.sequence):
            parallelize(stage, dims.tp, plan)
    if dims.sizes.cp > 1:
        context_parallel(stage, dims.cp, method=config.parallel.attention)
    if dims.sizes.sharing > 1:
        shard(stage, dims)
    return stage


def plans(stage: StageLayers, *, sequence: bool) -> list[dict[str, ParallelStyle]]:
    """Return how tp splits the parts of ``stage``, in two steps.

    With ``sequence``, norms and residuals work on a part of the sequence each, and layers that are
    split by features gather it before, and scatter their sums after.
    """
    outside = Shard(1) if sequence else Replicate()
    whole = PrepareModuleInput(outside, Replicate())
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(output_layouts=outside),
        "blocks.*.attention": whole,
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=outside),
        "head": ColwiseParallel(input_layouts=outside),
    }
    if sequence:
        plan["blocks.*.attention_norm"] = SequenceParallel()
        plan["blocks.*.feed_norm"] = SequenceParallel()
        plan["norm"] = SequenceParallel()
    around_experts: dict[str, ParallelStyle] = {}
    for name, block in stage.named_children():
        feed = getattr(block, "feed", None)
        if isinstance(feed, MoE):
            # It has the whole sequence on each rank of tp, and splits its experts by itself.
            plan[f"{name}.feed.shared.0"] = ColwiseParallel()
            plan[f"{name}.feed.shared.2"] = RowwiseParallel()
            if sequence:
                around_experts[f"{name}.feed_norm"] = PrepareModuleOutput(Shard(1), Replicate())
                around_experts[f"{name}.feed"] = PrepareModuleOutput(Replicate(), Shard(1))
        elif feed is not None:
            plan[f"{name}.feed"] = whole
            plan[f"{name}.feed.0"] = ColwiseParallel()
            plan[f"{name}.feed.2"] = RowwiseParallel(output_layouts=outside)
    paths = [path for path, _ in stage.named_modules()]
    here = {
        name: style
        for name, style in plan.items()
        if any(name.count(".") == path.count(".") and fnmatchcase(path, name) for path in paths)
    }
    return [here, around_experts] if around_experts else [here]


def shard(stage: StageLayers, dims: Dims) -> None:
    """Split each part over dp_shard, replicate it over the rest; experts apart from all else."""
    alone: list[Parameter] = []
    for part in stage:
        experts = getattr(getattr(part, "feed", None), "experts", None)
        if isinstance(experts, nn.Module):
            if dims.experts.size() > 1:
                fully_shard(experts, dims.experts)
            else:
                alone += experts.parameters()
        fully_shard(part, dims.dense, ignored_params=alone)
    fully_shard(stage, dims.dense, ignored_params=alone)
