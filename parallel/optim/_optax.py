"""Any optax optimizer for ``parallel.nn`` parameters, and its state by parameter.

An optax state is a pytree in which copies of the parameters' tree appear: moments, for example. For
a tree that is a dict with names that occur nowhere else, the leaves below a name belong to that
parameter; all others (a step count) are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from parallel._checks import check_state_dict, describe
from parallel.nn._parameter import Parameter
from parallel.optim._optimizer import Optimizer, ParamGroup

PATH_OF_LEAF = "{leaf}"

PerLeaf = dict[str, dict[str, Any]]
"""Name of a parameter → path in the state, with ``PATH_OF_LEAF`` in the name's place → array."""

Shared = dict[str, Any]
"""Path in the state → array."""


def check_transformation(transformation: object) -> None:
    """Raise TypeError for what is no ``optax.GradientTransformation``, or like one."""
    if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
        raise TypeError(
            "transformation must be an optax.GradientTransformation, such as optax.adamw(1e-3), "
            f"got {describe(transformation)}"
        )


def take_apart(state: Any, names: Collection[str]) -> tuple[PerLeaf, Shared]:
    """Return the leaves of ``state``: those that belong to each of ``names``, and the others."""
    import jax

    per_leaf: PerLeaf = {name: {} for name in names}
    shared: Shared = {}
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        name, text = generic(path, names)
        (shared if name is None else per_leaf[name])[text] = value
    return per_leaf, shared


def put_together(
    template: Any, per_leaf: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]
) -> Any:
    """Return a state of the structure of ``template`` with the leaves of ``take_apart``.

    Raises KeyError, naming the first leaf of the template that is missing.
    """
    names = set(per_leaf)

    def find(path: tuple[Any, ...]) -> Any:
        name, text = generic(path, names)
        source = shared if name is None else per_leaf[name]
        if text not in source:
            whose = "the state" if name is None else f"the state of {name}"
            raise KeyError(f"{whose} lacks {text}; it has {sorted(source)}")
        return source[text]

    return map_by_path(template, find)


def same_shared(parts: Mapping[int, Mapping[str, Any]]) -> Shared:
    """Return what is shared, of which each rank (the keys of ``parts``) has a copy.

    Raises ValueError, naming the first leaf and the ranks, where the copies differ.
    """
    (first, reference), *others = parts.items()
    for rank, part in others:
        for path, value in reference.items():
            if path in part and not np.array_equal(np.asarray(value), np.asarray(part[path])):
                raise ValueError(
                    f"the optimizer's {path} is {value} on rank {first} and {part[path]} on rank "
                    f"{rank}, which own different parameters: the transformation looks at several "
                    "parameters at once, so its state cannot be sharded"
                )
    return dict(reference)


def map_by_path(template: Any, find: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Return the tree of the structure of ``template`` with ``find(path)`` as leaves."""
    import jax

    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    return jax.tree_util.tree_unflatten(structure, [find(path) for path, _ in paths])


def generic(path: tuple[Any, ...], names: Collection[str]) -> tuple[str | None, str]:
    """Return the name in ``path`` (None: there is none), and the path without it, as text."""
    import jax

    for i, key in enumerate(path):
        if isinstance(key, jax.tree_util.DictKey) and key.key in names:
            before, after = path[:i], path[i + 1 :]
            text = jax.tree_util.keystr(before) + PATH_OF_LEAF + jax.tree_util.keystr(after)
            return str(key.key), text
    return None, jax.tree_util.keystr(path)


class OptaxOptimizer(Optimizer):
    """Updates NumPy parameters by an optax gradient transformation. Needs optax.

        optimizer = optim.OptaxOptimizer(model.parameters(), optax.adamw(1e-3))

    To the transformation the parameters are a dict, in their order. A parameter without a gradient
    counts as one with zeros. ``lr`` and the like are the transformation's own (a schedule, or
    ``optax.inject_hyperparams``): parameter groups have no options.

    ``params`` are parameters, or dicts ``{"params": [...]}``, as for any ``Optimizer``.

    Raises TypeError for what is no transformation. ``step`` raises ValueError for parameters that
    JAX would round (float64 without ``jax_enable_x64``).
    """

    def __init__(
        self, params: Iterable[Parameter] | Iterable[ParamGroup], transformation: Any
    ) -> None:
        check_transformation(transformation)
        super().__init__(params, {})
        import jax

        self._transformation = transformation
        self._state: Any = None
        self._update = jax.jit(transformation.update)

    def step(self) -> None:
        """Update all parameters."""
        named = self._named()
        if not named:
            return
        values = {name: _to_jax(name, p.data) for name, p in named.items()}
        grads = {
            name: _to_jax(name, np.zeros_like(p.data) if p.grad is None else p.grad)
            for name, p in named.items()
        }
        if self._state is None:
            self._state = self._transformation.init(values)
        updates, self._state = self._update(grads, self._state, values)
        for name, parameter in named.items():
            parameter.data += np.asarray(updates[name])

    def update(self, parameter: Parameter, group: ParamGroup) -> None:
        """Not possible: raises TypeError. A transformation looks at all parameters at once."""
        raise TypeError("OptaxOptimizer updates all its parameters at once: call step()")

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter number, what is ``"shared"``, and the groups."""
        state = super().state_dict()
        per_leaf, shared = take_apart(self._full_state(), self._named())
        state["state"] = {
            number: {path: np.asarray(value) for path, value in leaves.items()}
            for number, leaves in enumerate(per_leaf.values())
        }
        state["shared"] = {path: np.asarray(value) for path, value in shared.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned.

        Raises TypeError for what is no state dict, ValueError for groups of other sizes or state
        of other parameters, KeyError for the state of another transformation.
        """
        super().check_state(state)
        loaded = self._put_together(state)
        self._load_options(state)
        import jax

        self._state = jax.tree_util.tree_map(jax.numpy.array, loaded)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what ``load_state_dict`` would raise for a state that does not fit."""
        super().check_state(state)
        self._put_together(state)

    def _put_together(self, state: Mapping[str, Any]) -> Any:
        check_state_dict(state, "shared")
        per_leaf = {_name(number): leaves for number, leaves in state["state"].items()}
        return put_together(self._full_state(), per_leaf, state["shared"])

    def _full_state(self) -> Any:
        if self._state is not None:
            return self._state
        return self._transformation.init(
            {name: _to_jax(name, p.data) for name, p in self._named().items()}
        )

    def _named(self) -> dict[str, Parameter]:
        return {_name(number): parameter for number, parameter in enumerate(self.parameters())}


def _name(number: int) -> str:
    return f"parameter {number:06}"  # sorted as numbers are: JAX sorts dicts by key


def _to_jax(name: str, array: Any) -> Any:
    import jax

    # A copy: what the state keeps must not be memory that the parameters are updated in.
    value = jax.numpy.array(array)
    if value.dtype != array.dtype:
        raise ValueError(
            f"{name} is {array.dtype.name}, which JAX rounds to {value.dtype.name}; set "
            "jax.config.update('jax_enable_x64', True)"
        )
    return value
