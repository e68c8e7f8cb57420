"""Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from parallel._arrays import Array, namespace
from parallel._checks import check_nonnegative, check_number, describe
from parallel.nn._parameter import Parameter
from parallel.optim._blocks import in_blocks
from parallel.optim._optimizer import Optimizer, ParamGroup, changeable, with_decay


class Adam(Optimizer):
    """Adam: Kingma and Ba, arXiv:1412.6980, algorithm 1.

    ``params`` are parameters, or groups of them: dicts with ``"params"`` and options that differ.
    ``lr`` is the size of a step, ``betas`` how much of the two moments is kept in each.
    ``weight_decay`` adds a penalty of the squared norm to the gradient; for decoupled decay use
    ``AdamW``. ``eps`` is added to the root of the corrected second moment.

    Raises TypeError for an option that is no number, or betas that are not two, ValueError for a
    negative one or betas outside [0, 1); the same for those of groups.
    """

    _DECOUPLED = False

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[ParamGroup],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        if isinstance(betas, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            defaults["betas"] = tuple(betas)
        super().__init__(params, defaults)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for one of ``options``, as the class says."""
        super().check_options(options)
        check_nonnegative(**{name: options[name] for name in ("lr", "eps", "weight_decay")})
        betas = options["betas"]
        try:
            _, _ = betas
        except (TypeError, ValueError):
            raise TypeError(
                f"betas must be two numbers, such as (0.9, 0.999), got {describe(betas)}"
            ) from None
        for i, beta in enumerate(betas):
            check_number(beta, f"betas[{i}]")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must both lie in [0, 1), got {betas}")

    def update(self, parameter: Parameter, group: ParamGroup) -> None:
        """Move one parameter."""
        data = changeable(parameter)
        state = self.state.setdefault(parameter, {})
        if not state:
            xp = namespace(data)
            state["step"] = 0
            state["exp_avg"] = xp.zeros_like(data)
            state["exp_avg_sq"] = xp.zeros_like(data)
        state["step"] += 1
        for block in in_blocks(data, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
            self._move(group, state["step"], *block)

    def _move(
        self, group: ParamGroup, step: int, data: Array, grad: Array, mean: Array, square: Array
    ) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        decay = group["weight_decay"]
        if self._DECOUPLED:
            data *= 1 - lr * decay
        grad = with_decay(grad, data, 0 if self._DECOUPLED else decay)
        mean += (1 - beta1) * (grad - mean)
        square *= beta2
        square += (1 - beta2) * (grad * grad)
        denominator = namespace(data).sqrt(square)
        denominator /= math.sqrt(1 - beta2**step)
        denominator += group["eps"]
        data -= (lr / (1 - beta1**step)) * (mean / denominator)


class AdamW(Adam):
    """Adam with decoupled weight decay: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.

    The parameter is multiplied by ``1 - lr * weight_decay`` before Adam's step. ``params`` are
    parameters, or groups of them: dicts with ``"params"`` and options that differ. ``betas`` says
    how much of the two moments is kept in each step; ``eps`` is added to the root of the second.

    Raises TypeError for an option that is no number, or betas that are not two, ValueError for a
    negative one or betas outside [0, 1); the same for those of groups.
    """

    _DECOUPLED = True

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[ParamGroup],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
