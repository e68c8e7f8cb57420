"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parallel._arrays import Array, namespace
from parallel._checks import check_nonnegative, check_number
from parallel.nn._parameter import Parameter
from parallel.optim._blocks import in_blocks
from parallel.optim._optimizer import Optimizer, ParamGroup, changeable, with_decay


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, in the form that PyTorch uses.

    With g the gradient plus ``weight_decay * p``: the velocity becomes
    ``momentum * v + (1 - dampening) * g`` (in the first step: g), and p is moved by ``-lr * v``, or
    with ``nesterov`` by ``-lr * (g + momentum * v)``. Sutskever et al., "On the importance of
    initialization and momentum in deep learning", ICML 2013; unlike there, lr scales v when it is
    applied, not when it is accumulated.

    ``params`` are parameters, or groups of them: dicts with ``"params"`` and options that differ.

    Raises TypeError for an option that is no number, ValueError for a negative one (dampening may
    be) and for ``nesterov`` without momentum or with dampening; the same for those of groups.
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[ParamGroup],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
        )

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for one of ``options``, as the class says."""
        super().check_options(options)
        check_nonnegative(**{name: options[name] for name in ("lr", "momentum", "weight_decay")})
        momentum, dampening = options["momentum"], options["dampening"]
        check_number(dampening, "dampening")
        if options["nesterov"] and (momentum == 0 or dampening != 0):
            raise ValueError(
                "nesterov needs momentum > 0 and dampening 0, "
                f"got momentum={momentum}, dampening={dampening}"
            )

    def update(self, parameter: Parameter, group: ParamGroup) -> None:
        """Move one parameter."""
        data, grad = changeable(parameter), parameter.grad
        if not group["momentum"]:
            for block in in_blocks(data, grad):
                _move(group, *block)
            return
        state = self.state.setdefault(parameter, {})
        move = _move_on if "momentum_buffer" in state else _move
        if move is _move:
            step = with_decay(grad, data, group["weight_decay"])
            state["momentum_buffer"] = step.copy()
        # What NumPy computes of arrays without dims are scalars, which cannot be changed in place.
        velocity = namespace(data).asanyarray(state["momentum_buffer"])
        state["momentum_buffer"] = velocity
        for block in in_blocks(data, grad, velocity):
            move(group, *block)


def _move(group: ParamGroup, data: Array, grad: Array, velocity: Array | None = None) -> None:
    """Make a step without a past. ``velocity``, if any, is that step."""
    step = with_decay(grad, data, group["weight_decay"])
    if velocity is not None and group["nesterov"]:
        step = step + group["momentum"] * velocity
    data -= group["lr"] * step


def _move_on(group: ParamGroup, data: Array, grad: Array, velocity: Array) -> None:
    """Make a step behind others, whose ``velocity`` becomes the new one."""
    momentum = group["momentum"]
    step = with_decay(grad, data, group["weight_decay"])
    velocity *= momentum
    velocity += (1 - group["dampening"]) * step
    data -= group["lr"] * (step + momentum * velocity if group["nesterov"] else velocity)
