"""The state of a training run as global arrays, from which a checkpoint loads on another mesh.

The state dicts of modules and optimizers contain a DArray for each array that is split over ranks.
If a rank holds the optimizer states of some parameters only, its state contains only these.
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
    """Return ``{"model": ..., "optimizer": ...}``, for all ranks to save together.

    Arrays are not copied. All ranks must call: with a ``ZeroRedundancyOptimizer`` they exchange
    which rank owns which state. Each of its states is a DArray on the owner alone.

    Args:
        model: The module; for a ``DistributedDataParallel``, its ``module``.
        optimizer: The optimizer of its parameters, to save its state as well.

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

    The optimizer need not have made a step: the layout of its states follows from the shapes of
    the parameters.

    Args:
        model: The module that the state is for; for a ``DistributedDataParallel``, its ``module``.
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
        model: The module; its ``load_state_dict`` receives this rank's parts.
        optimizer: The optimizer, likewise.

    Raises:
        KeyError: If the state lacks an entry.
        ValueError: If the state does not fit the model or the optimizer, for example because it
            is from another kind of optimizer. Nothing is changed.
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
        # Only keys of the form ("state", number, name) belong to a parameter's state.
        number = keys[1] if len(keys) == 3 and keys[0] == "state" else -1
        if not isinstance(number, int) or not 0 <= number < len(numbered):
            return ...
        parameter = numbered[number]
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return optimizer.state_sharding(parameter, shape)
        part = parameter.global_part
        return part.sharding if part is not None and part.shape == shape else ...

    return layout
