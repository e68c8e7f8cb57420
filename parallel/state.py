"""The state of a training run as global arrays: what a checkpoint needs to load on another mesh.

The state dicts of modules and optimizers have DArrays for the arrays of which each rank has a part.
Where each rank has the states of some parameters only, so has the state here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshlib.sharding import Sharding
from parallel._checks import check_instance, check_state_dict
from parallel.nn._module import Module
from parallel.optim._optimizer import Optimizer
from parallel.zero import ZeroRedundancyOptimizer


def global_state(model: Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}``, to be saved by all ranks together.

    Arrays are not copied. All ranks call: those of a ``ZeroRedundancyOptimizer`` tell each other
    which states they keep, each of which is then a DArray on its owner's rank alone.

    Args:
        model: The module; of a ``DistributedDataParallel`` its ``module``.
        optimizer: That of its parameters, if its state is to be saved too.

    Raises:
        TypeError: For a value that is not a module or optimizer.
    """
    _check(model, optimizer)
    state: dict[str, Any] = {"model": model.state_dict()}
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        state["optimizer"] = optimizer.global_state_dict()
    elif optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    return state


def global_layout(model: Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return the argument ``like`` with which ``meshlib.checkpoint.load`` loads the state.

    The optimizer need not have made a step: its states are laid out by the shapes of the
    parameters that they belong to.

    Args:
        model: The module that the state is for; of a ``DistributedDataParallel`` its ``module``.
        optimizer: The optimizer of its parameters, to load its state as well.

    Raises:
        TypeError: For an argument that is not a module or optimizer.
    """
    _check(model, optimizer)
    like: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        like["optimizer"] = _layout_of(optimizer)
    return like


def restore(state: Mapping[str, Any], model: Module, optimizer: Optimizer | None = None) -> None:
    """Copy a loaded state, in the layout of ``global_layout``, into a model and its optimizer.

    Args:
        state: ``{"model": ..., "optimizer": ...}``; other entries are ignored.
        model: The module, whose ``load_state_dict`` gets this rank's parts.
        optimizer: The optimizer, likewise.

    Raises:
        KeyError: If the state lacks an entry.
        ValueError: For a state that does not fit the model or the optimizer, such as that of
            another kind of optimizer. Nothing is changed then.
        TypeError: For an argument that is not a state, module or optimizer.
    """
    _check(model, optimizer)
    check_state_dict(state, "model", *([] if optimizer is None else ["optimizer"]))
    if optimizer is not None:
        optimizer.check_state(state["optimizer"])  # before the model is changed
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def _check(model: Any, optimizer: Any) -> None:
    check_instance(model, Module, "model")
    if optimizer is not None:
        check_instance(optimizer, Optimizer, "optimizer", "optim.AdamW(model.parameters())")


def _layout_of(optimizer: Optimizer) -> Callable[[tuple[Any, ...], tuple[int, ...]], Any]:
    numbered = optimizer.parameters()

    def layout(keys: tuple[Any, ...], shape: tuple[int, ...]) -> Sharding | Any:
        # ("state", number, name); anything else is not a state of a parameter.
        number = keys[1] if len(keys) == 3 and keys[0] == "state" else -1
        if not isinstance(number, int) or not 0 <= number < len(numbered):
            return ...
        parameter = numbered[number]
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return optimizer.state_sharding(parameter, shape)
        lies = parameter.global_part
        return lies.sharding if lies is not None and lies.shape == shape else ...

    return layout
