"""Cutting a model into stages: by names, or so that they cost alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from parallel._checks import check_instance, describe, to_count
from parallel.nn._layers.container import Sequential
from parallel.nn._module import Module

Costs = Callable[[Module], float] | Sequence[float]
"""What layers cost: a function of a layer, or a number for each."""


class Part(Sequential):
    """Some layers of a model, under the paths that they have there.

    So the parts' ``state_dict``s together are the model's. ``named`` are (path, layer).
    """

    def __init__(self, named: Sequence[tuple[str, Module]]) -> None:
        super().__init__(*(layer for _, layer in named))
        self._paths = [path for path, _ in named]

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (path in the whole model, layer)."""
        return zip(self._paths, self.layers, strict=True)


def split(model: Sequential, at: Sequence[str]) -> list[Part]:
    """Return the stages of ``model``, cut before each of the layers that ``at`` names.

    Args:
        model: layers in a row; those of a ``Sequential`` within are layers, too: "1.0".
        at: paths of the layers with which the second stage begins, the third, and so on.

    Returns:
        The stages: one more than names. They have the model's own layers.

    Raises:
        TypeError: for what is no ``Sequential`` or list of names.
        ValueError: for a name that is no layer, is there twice, out of order, or the first layer.
    """
    named = _layers(model)
    if isinstance(at, str) or not isinstance(at, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"at must be a list of names such as ['2', '4.1'], got {describe(at)}")
    starts: list[int] = [0]
    for i, name in enumerate(at):
        place = _place_of(name, [path for path, _ in named])
        if place is None:
            raise ValueError(
                f"at[{i}] is {name!r}, which names no layer; the layers are "
                f"{', '.join(path for path, _ in named)}"
            )
        if place <= starts[-1]:
            raise ValueError(
                f"at[{i}] is {name!r}, which does not come after {named[starts[-1]][0]!r}, with "
                "which the stage before begins"
            )
        starts.append(place)
    return _parts(named, starts)


def split_by_cost(model: Sequential, num_stages: int, costs: Costs | None = None) -> list[Part]:
    """Return ``num_stages`` stages of ``model`` of which the dearest is as cheap as can be.

    Args:
        model: layers in a row; those of a ``Sequential`` within are layers, too.
        num_stages: how many stages.
        costs: what each layer costs, such as its measured time; by default its parameters.

    Returns:
        The stages. They have the model's own layers.

    Raises:
        TypeError: for what is no ``Sequential`` or number.
        ValueError: for more stages than layers, another number of costs, or a negative one.
    """
    named = _layers(model)
    count = to_count(num_stages, "num_stages")
    if count > len(named):
        raise ValueError(f"num_stages is {count}, the model has {len(named)} layers")
    return _parts(named, _cheapest(_costs(named, costs), count))


def _layers(model: Any) -> list[tuple[str, Module]]:
    check_instance(model, Sequential, "model", "nn.Sequential(...)")
    return list(_flat("", model))


def _flat(path: str, module: Module) -> Iterator[tuple[str, Module]]:
    """Yield the layers below ``module``; what is a Sequential and more stays whole."""
    if type(module) not in (Sequential, Part):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _flat(f"{path}.{name}" if path else name, child)


def _place_of(name: str, paths: Sequence[str]) -> int | None:
    """Return the number of the layer ``name``, or of the first one in the Sequential ``name``."""
    inside = f"{name}."
    return next((i for i, p in enumerate(paths) if p == name or p.startswith(inside)), None)


def _parts(named: Sequence[tuple[str, Module]], starts: Sequence[int]) -> list[Part]:
    ends = [*starts[1:], len(named)]
    return [Part(named[begin:end]) for begin, end in zip(starts, ends, strict=True)]


def _costs(named: Sequence[tuple[str, Module]], costs: Costs | None) -> list[float]:
    if costs is None:
        return [float(sum(p.size for p in layer.parameters())) for _, layer in named]
    listed = [costs(layer) for _, layer in named] if callable(costs) else list(costs)
    if len(listed) != len(named):
        raise ValueError(f"costs has {len(listed)} entries, the model {len(named)} layers")
    for (path, _), cost in zip(named, listed, strict=True):
        if not cost >= 0:
            raise ValueError(f"the cost of layer {path} is {cost}; expected at least 0")
    return [float(cost) for cost in listed]


def _cheapest(costs: Sequence[float], stages: int) -> list[int]:
    """Return where stages begin, such that the largest sum is the smallest possible.

    The linear partition problem, by dynamic programming: ``best[n]`` is the smallest largest sum of
    the first n layers in so many stages as were gone through; later cuts win ties.
    """
    total = [*accumulate(costs, initial=0.0)]
    best = list(total)
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        found = [float("inf")] * (len(costs) + 1)
        cut = [0] * (len(costs) + 1)
        for end in range(stage + 1, len(costs) + 1):
            for begin in range(stage, end):
                largest = max(best[begin], total[end] - total[begin])
                if largest <= found[end]:
                    found[end], cut[end] = largest, begin
        best = found
        cuts.append(cut)
    starts: list[int] = []
    end = len(costs)
    for cut in reversed(cuts):
        end = cut[end]
        starts.append(end)
    return [0, *reversed(starts)]
