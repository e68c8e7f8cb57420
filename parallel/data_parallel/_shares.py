"""Dividing nested arrays among replicas, and joining what these return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from parallel._arrays import Array, is_array, namespace
from parallel._nested import all_leaves, map_leaves
from parallel.data_parallel._devices import Devices


def divide_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, device_ids: Sequence[int], on: Devices
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each replica, on its device: equal parts along ``dim``.

    The parts are those of ``torch.chunk``: all of ceil(rows / devices) rows but the last, so there
    may be fewer parts than devices. Arrays without ``dim`` are copied to each device, other values
    given to each.

    Raises ValueError for arrays that disagree in their rows.
    """
    every = [*all_leaves(args, "args"), *all_leaves(kwargs, "kwargs")]
    rows: dict[str, int] = {p: leaf.shape[dim] for p, leaf in every if _is_divided(leaf, dim)}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{path} has {count}" for path, count in rows.items())
        raise ValueError(
            f"the inputs differ in their size along dim {dim}: {listed}; expected the same, which "
            "is divided among the devices"
        )
    total = next(iter(rows.values()), 0)
    size = max(-(-total // len(device_ids)), 1)
    shares: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for device, begin in zip(device_ids, range(0, max(total, 1), size), strict=False):

        def part(_: str, leaf: Any, device: int = device, begin: int = begin) -> Any:
            if not _is_real_array(leaf):
                return leaf
            whole = not _is_divided(leaf, dim)
            return on.put(leaf if whole else leaf[_along(dim, begin, begin + size)], device)

        shares.append((map_leaves(part, args), map_leaves(part, kwargs)))
    return shares


def first_device(value: Any, on: Devices) -> int | None:
    """Return the device of the first array in ``value``; None if that is the host or none."""
    return next((on.device_of(leaf) for _, leaf in all_leaves(value) if _is_real_array(leaf)), None)


@dataclass(frozen=True, slots=True)
class Joined:
    """How an array of the output was made of the replicas' results: so its gradient is divided."""

    dim: int
    rows: tuple[int, ...]
    """The size of each replica's part along ``dim``."""
    numbers: bool
    """Whether each replica gave a number, one element of the array."""


Plan = Any
"""A ``Joined`` for each array of the output, nested as that is; None for what is no array."""


def plan_of(outputs: Sequence[Any], dim: int) -> Plan:
    """Return how ``outputs``, one of each replica, are to be joined.

    Raises TypeError and ValueError, naming the place, where that is not possible.
    """

    def how(path: str, *leaves: Any) -> Joined | None:
        if all(_is_divided(leaf, dim) for leaf in leaves):
            return Joined(dim, tuple(leaf.shape[dim] for leaf in leaves), numbers=False)
        if all(_is_number(leaf) for leaf in leaves):
            return Joined(0, (1,) * len(leaves), numbers=True)
        if any(_is_real_array(leaf) for leaf in leaves):
            shapes = [list(getattr(leaf, "shape", ())) for leaf in leaves]
            raise ValueError(
                f"{path} has shapes {shapes} in the replicas; expected arrays that have dim {dim}, "
                "or one number of each replica"
            )
        if any(leaf is not leaves[0] and leaf != leaves[0] for leaf in leaves):
            raise TypeError(
                f"{path} is {' and '.join(map(repr, leaves))} in the replicas; expected arrays, "
                "numbers, or the same in all"
            )
        return None

    return map_leaves(how, *outputs, path="output")


def join_outputs(plan: Plan, outputs: Sequence[Any], device: int, on: Devices) -> Any:
    """Return the replicas' outputs as one on ``device``: arrays along the plan's dim, numbers as a
    vector with one element of each replica, of other values the first replica's.
    """

    def join(_: str, how: Joined | None, *leaves: Any) -> Any:
        if how is None:
            return leaves[0]
        return _concatenated(leaves, how.dim, device, on, numbers=how.numbers)

    return map_leaves(join, plan, *outputs)


def divide_gradients(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_ids: Sequence[int],
    on: Devices,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each replica's backward, on its device.

    One argument is the gradient of the whole output; several are those of its entries. What is no
    array (None, a factor) is given to all.

    Raises ValueError for gradients that do not fit the output.
    """
    several = len(args) + len(kwargs) > 1
    if several and (kwargs or not isinstance(plan, list | tuple)):
        raise TypeError(
            f"backward got {len(args)} positional and {len(kwargs)} named arguments; expected one, "
            "the gradient of the output, or one for each entry of an output that is a tuple, by "
            "position"
        )

    def share(place: int, device: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def part(path: str, how: Joined | None, grad: Any) -> Any:
            if how is None or not _is_real_array(grad):
                return grad
            total = sum(how.rows)
            if grad.ndim <= how.dim or grad.shape[how.dim] != total:
                raise ValueError(
                    f"{path} must have size {total} along dim {how.dim}, as the output that it is "
                    f"the gradient of, got shape {list(grad.shape)}"
                )
            begin = sum(how.rows[:place])
            own = grad[_along(how.dim, begin, begin + how.rows[place])]
            return on.put(own.reshape(()) if how.numbers else own, device)

        if several:
            return map_leaves(part, plan, args, path="gradient"), {}
        return (
            tuple(map_leaves(part, plan, grad, path="gradient") for grad in args),
            {name: map_leaves(part, plan, grad, path=name) for name, grad in kwargs.items()},
        )

    return [share(place, device) for place, device in enumerate(device_ids)]


def join_gradients(results: Sequence[Any], dim: int, device: int, on: Devices) -> Any:
    """Return the gradient of the whole input, on ``device``.

    Parts are put together along ``dim``; of what each replica got as a whole, gradients are added,
    in the order of the replicas.
    """

    def join(path: str, *leaves: Any) -> Any:
        if all(_is_divided(leaf, dim) for leaf in leaves):
            return _concatenated(leaves, dim, device, on)
        if all(leaf is None for leaf in leaves):
            return None
        if any(leaf is None for leaf in leaves):
            raise TypeError(f"{path} is None in some of the replicas only")
        with on.on(device):
            first, *others = [on.put(x, device) if _is_real_array(x) else x for x in leaves]
            # Not in place: a backward may return an array that is not its own.
            return reduce(add, others, first)

    return map_leaves(join, *results, path="the input's gradient")


def _concatenated(
    leaves: Sequence[Any], dim: int, device: int, on: Devices, *, numbers: bool = False
) -> Array:
    if not numbers and len(leaves) == 1:
        return on.put(leaves[0], device)
    with on.on(device):
        parts = on.put_all([np.asarray(x) if _is_plain(x) else x for x in leaves], device)
        parts = [part.reshape(1) for part in parts] if numbers else parts
        return namespace(parts[0]).concatenate(parts, axis=dim)


def _along(dim: int, begin: int, end: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(begin, end))


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | complex | np.generic)


def _is_real_array(value: Any) -> bool:
    # A scalar of NumPy's is a number, of no device.
    return is_array(value) and not isinstance(value, np.generic)


def _is_number(value: Any) -> bool:
    return _is_plain(value) or (_is_real_array(value) and value.ndim == 0)


def _is_divided(value: Any, dim: int) -> bool:
    return _is_real_array(value) and value.ndim > dim
