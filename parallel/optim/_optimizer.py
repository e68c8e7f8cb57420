"""What all optimizers share: parameter groups, state, and state dicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallel._arrays import Array, namespace
from parallel._checks import check_instance, check_state_dict, describe
from parallel.nn._parameter import Parameter, as_kept, from_kept

ParamGroup = dict[str, Any]
"""``"params"``, a list of parameters, and a value for each option, such as ``"lr"``."""


class Optimizer(ABC):
    """Updates parameters from their gradients.

    ``params`` is an iterable of parameters, or of dicts ``{"params": [...], "lr": ..., ...}``
    whose options override ``defaults`` for their parameters. ``param_groups`` may be changed
    between steps; a learning-rate schedule sets ``group["lr"]``.

    Raises ValueError for no parameters, and what ``add_param_group`` raises.
    """

    def __init__(
        self, params: Iterable[Parameter] | Iterable[ParamGroup], defaults: Mapping[str, Any]
    ) -> None:
        self.defaults: dict[str, Any] = dict(defaults)
        self.param_groups: list[ParamGroup] = []
        self.state: dict[Parameter, dict[str, Any]] = {}
        entries = _listed(params, "params")
        if not entries:
            raise ValueError("params is empty; an optimizer needs at least one parameter")
        if isinstance(entries[0], Parameter):
            entries = [{"params": entries}]
        for entry in entries:
            self.add_param_group(entry)

    def add_param_group(self, group: ParamGroup) -> None:
        """Add parameters with options of their own.

        Raises TypeError for what is no parameter, ValueError for an unknown option, one that
        ``check_options`` refuses, or a parameter that the optimizer has already.
        """
        if not isinstance(group, Mapping) or "params" not in group:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "params must hold Parameters, or dicts {'params': [...], ...}, got "
                f"{describe(group)}"
            )
        options = {name: value for name, value in group.items() if name != "params"}
        merged = {**self.defaults, **options}
        self.check_options(merged)
        parameters = _listed(group["params"], "params")
        known = set(map(id, self.parameters()))
        for parameter in parameters:
            if not isinstance(parameter, Parameter):
                raise TypeError(f"params must hold Parameters, got {describe(parameter)}")
            if id(parameter) in known:
                raise ValueError(f"{parameter!r} was given to the optimizer twice")
            known.add(id(parameter))
        self.param_groups.append({"params": parameters, **merged})

    def parameters(self) -> list[Parameter]:
        """Return all parameters in the order in which they were given, that of their numbers."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for an option that the optimizer does not have.

        A subclass adds what it raises for their values. ``options`` are all those of a group.
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

    def step_for(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Update those of ``parameters`` that the optimizer has and that have a gradient.

        Returns them. For stepping in pieces, such as during a backward pass.
        """
        groups = {p: group for group in self.param_groups for p in group["params"]}
        chosen = [p for p in parameters if p in groups and p.grad is not None]
        for parameter in chosen:
            self.update(parameter, groups[parameter])
        return chosen

    @abstractmethod
    def update(self, parameter: Parameter, group: ParamGroup) -> None:
        """Update one parameter, in place, from its gradient and its group's options."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the parameters' gradients, or fill them with zeros in place."""
        for parameter in self.parameters():
            parameter.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {number: {...}}, "param_groups": [...]}``.

        Parameters are numbered in the order in which they were given. Arrays are not copied; those
        like a parameter of which each rank keeps a part (``fully_shard``) are DArrays.
        """
        numbers = self._numbers()
        return {
            "state": {
                numbers[p]: {name: as_kept(p, value) for name, value in values.items()}
                for p, values in self.state.items()
            },
            "param_groups": [
                {**group, "params": [numbers[p] for p in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned. Arrays are copied.

        Those of parameters in parts are DArrays in any sharding (all ranks call), or whole ones.

        Raises TypeError for what is no state dict, KeyError for one that lacks something, and
        ValueError when the groups lack an option that this optimizer has (the state is another
        one's) or have other sizes, or there is state of a parameter that it does not have. Nothing
        is changed then.
        """
        self.check_state(state)
        numbered = self.parameters()
        self._load_options(state)
        self.state = {
            numbered[number]: {
                name: from_kept(numbered[number], value) for name, value in values.items()
            }
            for number, values in state["state"].items()
        }

    def _load_options(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what ``load_state_dict`` would raise for a state that does not fit."""
        check_state_dict(state, "state", "param_groups")
        check_instance(state["state"], Mapping, "state['state']")
        check_instance(state["param_groups"], Sequence, "state['param_groups']")
        for number, group in enumerate(state["param_groups"]):
            check_state_dict(group, "params", name=f"state['param_groups'][{number}]")
        theirs = [len(group["params"]) for group in state["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if theirs != own:
            raise ValueError(f"state has groups of {theirs} parameters, this optimizer of {own}")
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
                f"state is of parameters {unknown} too; this optimizer has 0 to {count - 1}"
            )

    def _numbers(self) -> dict[Parameter, int]:
        return {parameter: number for number, parameter in enumerate(self.parameters())}


def _listed(params: Any, name: str) -> list[Any]:
    # A dict is one group, which a list has to be made of.
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        raise TypeError(
            f"{name} must be a list of Parameters, such as model.parameters(), or of dicts"
            f" {{'params': [...], ...}}, got {describe(params)}"
        )
    return list(params)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def changeable(parameter: Parameter) -> Array:
    """Return ``data`` to be changed in place; a NumPy scalar, which cannot be, becomes an array."""
    data = parameter.data = namespace(parameter.data).asanyarray(parameter.data)
    return data


def with_decay(grad: Array, data: Array, weight_decay: float) -> Array:
    """Return ``grad`` plus ``weight_decay * data`` (a penalty of the squared norm)."""
    return grad + weight_decay * data if weight_decay else grad
