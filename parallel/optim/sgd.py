"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parallel.checks import check_nonnegative, check_number
from parallel.nn.parameter import Parameter
from parallel.optim.optimizer import Optimizer, ParamGroup, with_decay


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
        step = with_decay(parameter, group["weight_decay"])
        momentum = group["momentum"]
        if momentum:
            state = self.state.setdefault(parameter, {})
            if "momentum_buffer" in state:
                velocity = state["momentum_buffer"]
                velocity *= momentum
                velocity += (1 - group["dampening"]) * step
            else:
                velocity = state["momentum_buffer"] = step.copy()
            step = step + momentum * velocity if group["nesterov"] else velocity
        parameter.data -= group["lr"] * step
