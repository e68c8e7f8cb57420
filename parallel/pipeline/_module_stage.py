"""Functions that split a model into stages, and ``PipelineStage`` for ``parallel.nn`` modules."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from parallel._arrays import Array, namespace
from parallel._checks import check_instance, describe, to_count
from parallel._core.pipeline.stage import Spec, Stage, as_tuple
from parallel._groups import GroupLike
from parallel.ddp._data_parallel import DistributedDataParallel
from parallel.fsdp._schedule import FSDPModule
from parallel.nn._layers.simple import Sequential
from parallel.nn._module import Module, SavedContexts, Work, do_all

Costs = Callable[[Module], float] | Sequence[float]
"""The costs of layers: a function of a layer, or a number for each layer."""


class StageLayers(Sequential):
    """Consecutive layers of a model, with their paths in the whole model.

    Together, the parts' ``state_dict``s are the model's. ``named`` are (path, layer).
    """

    def __init__(self, named: Sequence[tuple[str, Module]]) -> None:
        super().__init__(*(layer for _, layer in named))
        self._paths = [path for path, _ in named]

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (path in the whole model, layer)."""
        return zip(self._paths, self.layers, strict=True)


def split(model: Sequential, at: Sequence[str]) -> list[StageLayers]:
    """Return the stages of ``model``, split before each of the layers ``at``.

    Args:
        model: A sequence of layers. The layers of a nested ``Sequential`` count too, with paths
            such as "1.0".
        at: The paths of the first layers of the second stage, the third stage, and so on.

    Returns:
        The stages, one more than the names. They contain the model's own layers, not copies.

    Raises:
        TypeError: For a value that is not a ``Sequential`` or list of names.
        ValueError: For a name that is not a layer, is repeated or out of order, or is the first
            layer.
    """
    named = _layers(model)
    if isinstance(at, str) or not isinstance(at, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"at must be a list of names such as ['2', '4.1'], got {describe(at)}")
    starts: list[int] = [0]
    for i, name in enumerate(at):
        place = _place_of(name, [path for path, _ in named])
        if place is None:
            raise ValueError(
                f"at[{i}] is {name!r}, which is not a layer; the layers are "
                f"{', '.join(path for path, _ in named)}"
            )
        if place <= starts[-1]:
            raise ValueError(
                f"at[{i}] is {name!r}; expected a layer after {named[starts[-1]][0]!r}, the first "
                "layer of the previous stage"
            )
        starts.append(place)
    return _parts(named, starts)


def split_by_cost(
    model: Sequential, num_stages: int, costs: Costs | None = None
) -> list[StageLayers]:
    """Split ``model`` into ``num_stages`` stages that minimise the largest cost of a stage.

    Args:
        model: A sequence of layers. The layers of a nested ``Sequential`` count too.
        num_stages: The number of stages.
        costs: The cost of each layer, such as its measured time; by default its number of
            parameters.

    Returns:
        The stages. They contain the model's own layers, not copies.

    Raises:
        TypeError: For a value that is not a ``Sequential`` or number.
        ValueError: For more stages than layers, another number of costs, or a negative one.
    """
    named = _layers(model)
    count = to_count(num_stages, "num_stages")
    if count > len(named):
        raise ValueError(f"num_stages is {count}, but the model has only {len(named)} layers")
    return _parts(named, _cheapest(_costs(named, costs), count))


def _layers(model: Any) -> list[tuple[str, Module]]:
    check_instance(model, Sequential, "model", "nn.Sequential(...)")
    return list(_flat("", model))


def _flat(path: str, module: Module) -> Iterator[tuple[str, Module]]:
    """Yield (path, layer), descending into a plain ``Sequential`` but not into a subclass."""
    if type(module) not in (Sequential, StageLayers):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _flat(f"{path}.{name}" if path else name, child)


def _place_of(name: str, paths: Sequence[str]) -> int | None:
    """Return the index of the layer ``name``, or of the first layer in the Sequential ``name``."""
    inside = f"{name}."
    return next((i for i, p in enumerate(paths) if p == name or p.startswith(inside)), None)


def _parts(named: Sequence[tuple[str, Module]], starts: Sequence[int]) -> list[StageLayers]:
    ends = [*starts[1:], len(named)]
    return [StageLayers(named[begin:end]) for begin, end in zip(starts, ends, strict=True)]


def _costs(named: Sequence[tuple[str, Module]], costs: Costs | None) -> list[float]:
    if costs is None:
        return [float(sum(p.size for p in layer.parameters())) for _, layer in named]
    listed = [costs(layer) for _, layer in named] if callable(costs) else list(costs)
    if len(listed) != len(named):
        raise ValueError(f"costs has {len(listed)} entries, but the model has {len(named)} layers")
    for (path, _), cost in zip(named, listed, strict=True):
        if not cost >= 0:
            raise ValueError(f"the cost of layer {path} is {cost}; expected at least 0")
    return [float(cost) for cost in listed]


def _cheapest(costs: Sequence[float], stages: int) -> list[int]:
    """Return the first layers of the stages that minimise the largest sum of costs.

    Solves the linear partition problem by dynamic programming. After stage s, ``best[n]`` is the
    smallest possible maximum for the first n layers in s + 1 stages. Later cuts win ties.
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


_Synchronising = DistributedDataParallel | FSDPModule


class PipelineStage(Stage):
    """A pipeline stage that is a module.

        stage = PipelineStage(part, mesh.get_local_rank("pp"), 4, mesh["pp"])

    The module's arguments are the previous stage's outputs: one or more arrays. Its ``backward``
    accepts a gradient for each output, and returns one for each input. The module may be wrapped in
    ``DistributedDataParallel``, or fully sharded, over other dims of the mesh. Gradients are then
    averaged once per step, after the last microbatch.

    Args:
        submodule: The module.
        stage_index: This stage's number, from 0.
        num_stages: The number of stages on all ranks.
        mesh: The ranks of the pipeline: ``mesh["pp"]``, a process group, or None for the default
            group.
        shared: Parameters that other stages have as well, such as an embedding that is also the
            output layer's weight. It maps a name, which is the same in all these stages, to the
            parameter's path. The first of these stages determines the initial values, and
            gradients are summed.

    Raises:
        TypeError: For an argument of the wrong type.
        ValueError: For a stage out of range, or if this rank is not in the mesh.
        KeyError: For a shared path that the module does not have.
    """

    def __init__(
        self,
        submodule: Module,
        stage_index: int,
        num_stages: int,
        mesh: GroupLike | None = None,
        *,
        shared: dict[str, str] | None = None,
    ) -> None:
        check_instance(submodule, Module, "submodule")
        super().__init__(stage_index, num_stages, mesh)
        self.submodule: Module = submodule
        if not isinstance(shared, dict | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "shared must be a dict such as {'embedding': '0.weight'}, got " + describe(shared)
            )
        self.shared: dict[str, str] = shared or {}
        paths = dict(submodule.named_parameters(remove_duplicate=False))
        for name, path in self.shared.items():
            if path not in paths:
                raise KeyError(f"shared[{name!r}] is {path!r}; {self!r} has {sorted(paths)}")
        self.shared_parameters = {name: paths[path] for name, path in self.shared.items()}
        self._synchronising = list(_outermost(submodule))
        self._contexts: dict[int, SavedContexts] = {}
        self._weights: dict[int, list[Work]] = {}
        self._was_training = submodule.training

    def empty(self, spec: Spec) -> Array:
        first = next(self.submodule.parameters(), None)
        library = np if first is None else namespace(first.data)
        return library.empty(spec.shape, dtype=spec.dtype)

    def joined(self, arrays: Sequence[Array]) -> Array:
        return namespace(arrays[0]).concatenate(arrays)

    def check_loss(self, function: Any) -> None:
        check_instance(function, Module, "loss_fn", "nn.CrossEntropyLoss()")

    def begin(self, training: bool) -> None:
        self._was_training = self.submodule.training
        if self._was_training != training:
            self.submodule.train(training)

    def forward(
        self, microbatch: int, inputs: Sequence[Array], kwargs: dict[str, Any]
    ) -> tuple[Array, ...]:
        """Run the module, and store its saved contexts for this microbatch."""
        # Only the first microbatch copies buffers from rank 0.
        with self._no_sync() if microbatch else ExitStack():
            output = self.submodule(*inputs, **kwargs)
        if self.submodule.training:
            self._contexts[microbatch] = self.submodule.take_saved()
        return as_tuple(output, f"the output of {self!r}")

    def loss(
        self, function: Any, outputs: Sequence[Array], target: Any, scale: float | None
    ) -> tuple[float, tuple[Array, ...]]:
        function.train(scale is not None)
        value = function(*outputs, target)
        if scale is None:
            return float(value), ()
        return float(value), as_tuple(function.backward(scale), "the gradient of the loss")

    def backward(
        self, microbatch: int, grads: Sequence[Array | None], *, last: bool
    ) -> tuple[Array | None, ...]:
        self.submodule.put_saved(self._contexts.pop(microbatch))
        with ExitStack() if last else self._no_sync():
            return _gradients(self.submodule.backward(*grads))

    def backward_input(
        self, microbatch: int, grads: Sequence[Array | None]
    ) -> tuple[Array | None, ...]:
        self.submodule.put_saved(self._contexts.pop(microbatch))
        with self._no_sync(), self.submodule.deferring() as deferred:
            result = _gradients(self.submodule.backward(*grads))
        self._weights[microbatch] = deferred
        return result

    def backward_weight(self, microbatch: int, *, last: bool) -> None:
        work: Work = partial(do_all, self._weights.pop(microbatch))
        if not last:
            with self._no_sync():
                work()
            return
        for module in self._synchronising:
            if isinstance(module, DistributedDataParallel):
                work = partial(module.average_after, work)
        work()

    def end(self, failed: bool) -> None:
        if self.submodule.training != self._was_training:
            self.submodule.train(self._was_training)
        if failed:
            for contexts in self._contexts.values():
                self.submodule.put_saved(contexts)
            self.submodule.discard_saved()
        self._contexts.clear()
        self._weights.clear()

    @contextmanager
    def _no_sync(self) -> Generator[None]:
        with ExitStack() as stack:
            for module in self._synchronising:
                stack.enter_context(module.no_sync())
            yield


def _gradients(value: Any) -> tuple[Array | None, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _outermost(module: Module) -> Iterator[_Synchronising]:
    """Yield the modules that reduce gradients, without descending into them."""
    if isinstance(module, DistributedDataParallel | FSDPModule):
        yield module
        return
    for _, child in module.named_children():
        yield from _outermost(child)
