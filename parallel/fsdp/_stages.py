"""ZeRO's stages by their number: one training loop, and what of the state is split a setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshlib import DeviceMesh
from parallel._checks import check_callable, check_instance, describe
from parallel._core.replicas import told_to_all
from parallel.ddp._data_parallel import DistributedDataParallel
from parallel.fsdp._fully_shard import fully_shard
from parallel.nn._module import Module
from parallel.nn._precision import MixedPrecisionPolicy
from parallel.optim._optimizer import Optimizer
from parallel.zero._optimizer import ZeroRedundancyOptimizer


def zero_redundancy(
    module: Module,
    optimizer_class: Callable[..., Optimizer],
    mesh: DeviceMesh,
    *,
    stage: int,
    layers: Iterable[Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    **defaults: Any,
) -> tuple[Module, Optimizer]:
    """Return ``module`` and an optimizer for training at one of ZeRO's stages.

        model, optimizer = zero_redundancy(model, optim.AdamW, mesh["dp"], stage=3, lr=1e-3)

    Stage 0 splits nothing (``DistributedDataParallel``); 1 the optimizer's states (and
    ``ZeroRedundancyOptimizer``); 2 gradients, too (``fully_shard`` that keeps whole parameters from
    forward to backward); 3 parameters, too (``fully_shard``). The loop is the same: ``model(x)``,
    ``model.backward(grad)``, ``optimizer.step()``.

    Args:
        module: the model.
        optimizer_class: called with parameters and ``defaults``.
        mesh: the ranks: a slice of one dim; in stages 2 and 3 of two for HSDP, in 0 and 1 of any.
        stage: 0, 1, 2 or 3.
        layers: for stages 2 and 3, the modules whose parameters are gathered together, the
            innermost first; by default the children of ``module`` that have parameters.
        mp_policy: for stages 2 and 3.
        defaults: options of ``optimizer_class``.

    Returns:
        The model to train, and the optimizer.

    Raises:
        ValueError: on every rank, for another stage, and options that the stage has no use for.
        TypeError: for what is no mesh; on every rank, for other arguments of another type; and what
            the four raise.
    """
    check_instance(mesh, DeviceMesh, "mesh", "mesh['dp']")
    where = f"rank {mesh.get_rank()}"
    with told_to_all(mesh.process_group):
        check_instance(module, Module, "module")
        check_callable(optimizer_class, "optimizer_class")
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ValueError(f"{where}: stage must be 0, 1, 2 or 3, got {describe(stage)}")
        for name, value in (("layers", layers), ("mp_policy", mp_policy)):
            if stage < 2 and value is not None:
                raise ValueError(
                    f"{where}: {name} is {value!r}, which stage {stage} has no use for; expected"
                    " None, or stage 2 or 3"
                )
    if stage < 2:
        model = DistributedDataParallel(module, mesh)
        if not stage:
            return model, optimizer_class(module.parameters(), **defaults)
        return model, ZeroRedundancyOptimizer(
            module.parameters(), optimizer_class, mesh, **defaults
        )
    children = (
        child for _, child in module.named_children() if any(True for _ in child.parameters())
    )
    for layer in children if layers is None else layers:
        fully_shard(layer, mesh, reshard_after_forward=stage == 3, mp_policy=mp_policy)
    # With stage 3 the outermost one's stay, as its backward comes at once.
    keep = None if stage == 3 else False
    fully_shard(module, mesh, reshard_after_forward=keep, mp_policy=mp_policy)
    return module, optimizer_class(module.parameters(), **defaults)
