"""The optimizer base class, and the optimizers SGD, Adam and AdamW."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parallel._arrays import Array, namespace
from parallel._checks import (
    check_instance,
    check_nonnegative,
    check_number,
    check_state_dict,
    describe,
)
from parallel.nn._parameter import Parameter, as_global, from_global

ParamGroup = dict[str, Any]
"""A dict with ``"params"``, a list of parameters, and a value for each option, such as ``"lr"``."""


class Optimizer(ABC):
    """The base of optimizers, which update parameters from their gradients.

    ``params`` is an iterable of parameters, or of dicts ``{"params": [...], "lr": ..., ...}``
    whose options override ``defaults`` for their parameters. ``param_groups`` may be changed
    between steps; a learning-rate schedule sets ``group["lr"]``.

    Raises ValueError without parameters, and the errors of ``add_param_group``.
    """

    def __init__(
        self, params: Iterable[Parameter] | Iterable[ParamGroup], defaults: Mapping[str, Any]
    ) -> None:
        self.defaults: dict[str, Any] = dict(defaults)
        self.param_groups: list[ParamGroup] = []
        self.state: dict[Parameter, dict[str, Any]] = {}
        entries = _listed(params, "params")
        if not entries:
            raise ValueError("params is empty; expected at least one parameter")
        if isinstance(entries[0], Parameter):
            entries = [{"params": entries}]
        for entry in entries:
            self.add_param_group(entry)

    def add_param_group(self, group: ParamGroup) -> None:
        """Add parameters with their own options.

        Raises TypeError for a value that is not a parameter, ValueError for an option that
        ``check_options`` rejects, or a parameter that the optimizer has already.
        """
        if not isinstance(group, Mapping) or "params" not in group:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "params must contain Parameters, or dicts {'params': [...], ...}, got "
                f"{describe(group)}"
            )
        options = {name: value for name, value in group.items() if name != "params"}
        merged = {**self.defaults, **options}
        self.check_options(merged)
        parameters = _listed(group["params"], "params")
        known = set(map(id, self.parameters()))
        for parameter in parameters:
            if not isinstance(parameter, Parameter):
                raise TypeError(f"params must contain Parameters, got {describe(parameter)}")
            if id(parameter) in known:
                raise ValueError(f"{parameter!r} was passed to the optimizer twice")
            known.add(id(parameter))
        self.param_groups.append({"params": parameters, **merged})

    def parameters(self) -> list[Parameter]:
        """Return all parameters in the order of their numbers, in which they were passed."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for an unknown option; a subclass also checks the values.

        ``options`` has all options of one group.
        """
        unknown = sorted(set(options) - set(self.defaults))
        if unknown:
            raise ValueError(f"options {unknown} are unknown; expected {sorted(self.defaults)}")

    def step(self) -> None:
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    @abstractmethod
    def update(self, parameter: Parameter, group: ParamGroup) -> None:
        """Update one parameter, in place, from its gradient and its group's options."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the parameters' gradients, or fill them with zeros in place."""
        for parameter in self.parameters():
            parameter.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {number: {...}}, "param_groups": [...]}``.

        Parameters are numbered in the order in which they were passed. Arrays are not copied. The
        state arrays of a parameter that is split over ranks are DArrays.
        """
        numbers = self._numbers()
        return {
            "state": {
                numbers[p]: {name: as_global(p, value) for name, value in values.items()}
                for p, values in self.state.items()
            },
            "param_groups": [
                {**group, "params": [numbers[p] for p in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``. Arrays are copied.

        The state of a sharded parameter is a DArray in any sharding (all ranks must call), or a
        whole array.

        Raises TypeError unless ``state`` is a state dict, and KeyError if an entry is missing.
        Raises ValueError if the groups have other sizes or lack an option of this optimizer, or
        the state has a parameter that this optimizer lacks. After an error, nothing is changed.
        """
        self.check_state(state)
        numbered = self.parameters()
        self._load_options(state)
        self.state = {
            numbered[number]: {
                name: from_global(numbered[number], value) for name, value in values.items()
            }
            for number, values in state["state"].items()
        }

    def _load_options(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise the error of ``load_state_dict`` for a state that does not fit."""
        check_state_dict(state, "state", "param_groups")
        check_instance(state["state"], Mapping, "state['state']")
        check_instance(state["param_groups"], Sequence, "state['param_groups']")
        for number, group in enumerate(state["param_groups"]):
            check_state_dict(group, "params", name=f"state['param_groups'][{number}]")
        sizes = [len(group["params"]) for group in state["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if sizes != own:
            raise ValueError(
                f"state has groups of {sizes} parameters, but this optimizer has groups of {own}"
            )
        for number, group in enumerate(state["param_groups"]):
            lacking = [name for name in self.defaults if name not in group]
            if lacking:
                raise ValueError(
                    f"state['param_groups'][{number}] has the options"
                    f" {sorted(str(name) for name in group if name != 'params')}, but no {lacking};"
                    f" expected the state of a {type(self).__name__}"
                )
        count = sum(own)
        unknown = [number for number in state["state"] if number not in range(count)]
        if unknown:
            raise ValueError(
                f"state has parameters {unknown}, but this optimizer only has 0 to {count - 1}"
            )

    def _numbers(self) -> dict[Parameter, int]:
        return {parameter: number for number, parameter in enumerate(self.parameters())}


def _listed(params: Any, name: str) -> list[Any]:
    # A dict is a single group, but the argument must be a list of groups.
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        raise TypeError(
            f"{name} must be a list of Parameters, such as model.parameters(), or of dicts"
            f" {{'params': [...], ...}}, got {describe(params)}"
        )
    return list(params)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def changeable(parameter: Parameter) -> Array:
    """Return ``data`` for changes in place, after replacing a NumPy scalar by an array."""
    data = parameter.data = namespace(parameter.data).asanyarray(parameter.data)
    return data


def with_decay(grad: Array, data: Array, weight_decay: float) -> Array:
    """Return ``grad + weight_decay * data``: the gradient with a squared-norm penalty."""
    return grad + weight_decay * data if weight_decay else grad


_ELEMENTS = 1 << 17


def in_blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield views of ``arrays``, one block of elements at a time.

    Element-wise results are bitwise equal to those of whole arrays. Arrays that are small, on
    another device, not contiguous or of different shapes are yielded whole.
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
    """Stochastic gradient descent with momentum, as in PyTorch.

    Let g be the gradient plus ``weight_decay * p``. The velocity v becomes
    ``momentum * v + (1 - dampening) * g`` (in the first step: g). Then p changes by ``-lr * v``, or
    with ``nesterov`` by ``-lr * (g + momentum * v)``. Sutskever et al., "On the importance of
    initialization and momentum in deep learning", ICML 2013. Unlike in that paper, lr scales v when
    it is applied, not when it is accumulated.

    ``params`` are parameters, or groups of them: dicts with ``"params"`` and the group's options.

    Raises TypeError for an option that is not a number, ValueError for a negative option (except
    dampening), and ValueError for ``nesterov`` without momentum or with dampening. The same holds
    for options of groups.
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
                "nesterov requires momentum > 0 and dampening 0, "
                f"got momentum={momentum}, dampening={dampening}"
            )

    def update(self, parameter: Parameter, group: ParamGroup) -> None:
        data, grad = changeable(parameter), parameter.grad
        if not group["momentum"]:
            for block in in_blocks(data, grad):
                _move(group, *block)
            return
        state = self.state.setdefault(parameter, {})
        move = _move_with_velocity if "momentum_buffer" in state else _move
        if move is _move:
            step = with_decay(grad, data, group["weight_decay"])
            state["momentum_buffer"] = step.copy()
        # NumPy returns scalars for arrays without dims, and scalars cannot be changed in place.
        velocity = namespace(data).asanyarray(state["momentum_buffer"])
        state["momentum_buffer"] = velocity
        for block in in_blocks(data, grad, velocity):
            move(group, *block)


def _move(group: ParamGroup, data: Array, grad: Array, velocity: Array | None = None) -> None:
    """Make a first step, or one without momentum. ``velocity``, if any, is the step."""
    step = with_decay(grad, data, group["weight_decay"])
    if velocity is not None and group["nesterov"]:
        step = step + group["momentum"] * velocity
    data -= group["lr"] * step


def _move_with_velocity(group: ParamGroup, data: Array, grad: Array, velocity: Array) -> None:
    """Make a later step with momentum; update ``velocity`` in place."""
    momentum = group["momentum"]
    step = with_decay(grad, data, group["weight_decay"])
    velocity *= momentum
    velocity += (1 - group["dampening"]) * step
    data -= group["lr"] * (step + momentum * velocity if group["nesterov"] else velocity)


class Adam(Optimizer):
    """Adam: Kingma and Ba, arXiv:1412.6980, algorithm 1.

    ``params`` are parameters, or groups of them: dicts with ``"params"`` and the group's options.
    ``lr`` is the step size. ``betas`` are the decay rates of the two moments. ``weight_decay`` adds
    the gradient of a squared-norm penalty; for decoupled decay use ``AdamW``. ``eps`` is added to
    the root of the corrected second moment.

    Raises TypeError for an option that is not a number, or ``betas`` that are not two numbers.
    Raises ValueError for a negative option, or betas outside [0, 1). The same holds for options of
    groups.
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
            raise ValueError(f"betas must both be in [0, 1), got {betas}")

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
    parameters, or groups of them: dicts with ``"params"`` and the group's options. ``betas`` are
    the decay rates of the two moments; ``eps`` is added to the root of the second.

    Raises TypeError for an option that is not a number, or ``betas`` that are not two numbers.
    Raises ValueError for a negative option, or betas outside [0, 1). The same holds for options of
    groups.
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
