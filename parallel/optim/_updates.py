"""Stochastic gradient descent, Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from parallel._arrays import Array, namespace
from parallel._checks import check_nonnegative, check_number, describe
from parallel.nn._parameter import Parameter
from parallel.optim._optimizer import Optimizer, ParamGroup, changeable, with_decay

_ELEMENTS = 1 << 17


def in_blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield views of ``arrays`` block by block: together they are all of it.

    Element by element, what is computed of blocks has the same bits as of whole arrays. Arrays that
    are small, not of one shape, on another device, or not each in one piece of memory come as they
    are, at once.
    """
    shape, size = arrays[0].shape, arrays[0].size
    if size <= _ELEMENTS or not all(_is_flat(each) and each.shape == shape for each in arrays):
        yield arrays
        return
    flat = [array.reshape(-1) for array in arrays]
    for begin in range(0, size, _ELEMENTS):
        yield tuple(array[begin : begin + _ELEMENTS] for array in flat)


def _is_flat(array: Array) -> bool:
    return isinstance(array, np.ndarray) and array.flags.c_contiguous


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
