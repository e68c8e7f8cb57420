"""``PipelineStage``: a stage that is a ``parallel.nn`` module."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from parallel._arrays import Array, namespace
from parallel._checks import check_instance, describe
from parallel._core.pipeline.stage import Spec, Stage, as_tuple
from parallel._groups import Ranks
from parallel.ddp._data_parallel import DistributedDataParallel
from parallel.fsdp._module import FSDPModule
from parallel.nn._module import Module, SavedContexts, Work, do_all

_Synchronising = DistributedDataParallel | FSDPModule


class PipelineStage(Stage):
    """A part of a model, as one stage of a pipeline.

        stage = PipelineStage(part, mesh.get_local_rank("pp"), 4, mesh["pp"])

    The module takes what the stage before returns: an array, or a tuple of arrays, which are then
    so many arguments; its ``backward`` takes as many gradients, and returns those of its inputs.
    It may be wrapped in ``DistributedDataParallel``, or fully sharded, over other dims of the mesh:
    gradients are averaged once a step, with the last microbatch's.

    Args:
        submodule: the module.
        stage_index: which stage it is, from 0.
        num_stages: how many there are on all ranks.
        mesh: the ranks of the pipeline: ``mesh["pp"]``, a process group, or None for the default
            group.
        shared: parameters that other stages have as well, such as an embedding that is the output
            layer's weight: a name, the same at all of them, to the parameter's path. They begin
            with the values of the first stage that has them, and their gradients are summed.

    Raises:
        TypeError: for what is no module, number, mesh or mapping.
        ValueError: for a stage that is not there, and when this rank is not in the mesh.
        KeyError: for a shared path that the module does not have.
    """

    def __init__(
        self,
        submodule: Module,
        stage_index: int,
        num_stages: int,
        mesh: Ranks | None = None,
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
        """Return an array of the library that the parameters are of."""
        first = next(self.submodule.parameters(), None)
        library = np if first is None else namespace(first.data)
        return library.empty(spec.shape, dtype=spec.dtype)

    def joined(self, arrays: Sequence[Array]) -> Array:
        """Return ``arrays`` along dim 0."""
        return namespace(arrays[0]).concatenate(arrays)

    def check_loss(self, function: Any) -> None:
        """Raise TypeError for what is no module."""
        check_instance(function, Module, "loss_fn", "nn.CrossEntropyLoss()")

    def begin(self, training: bool) -> None:
        """Set the module's mode."""
        self._was_training = self.submodule.training
        if self._was_training != training:
            self.submodule.train(training)

    def forward(
        self, microbatch: int, inputs: Sequence[Array], kwargs: dict[str, Any]
    ) -> tuple[Array, ...]:
        """Run the module, and move aside what it has saved."""
        # Buffers are copied from rank 0 with the first microbatch, not with each.
        with self._no_sync() if microbatch else ExitStack():
            output = self.submodule(*inputs, **kwargs)
        if self.submodule.training:
            self._contexts[microbatch] = self.submodule.take_saved()
        return as_tuple(output, f"the output of {self!r}")

    def loss(
        self, function: Any, outputs: Sequence[Array], target: Any, scale: float | None
    ) -> tuple[float, tuple[Array, ...]]:
        """Run a loss: a module, with a backward, of the outputs and the target."""
        function.train(scale is not None)
        value = function(*outputs, target)
        if scale is None:
            return float(value), ()
        return float(value), as_tuple(function.backward(scale), "the gradient of the loss")

    def backward(
        self, microbatch: int, grads: Sequence[Array | None], *, last: bool
    ) -> tuple[Array | None, ...]:
        """Run the module's backward; ``last``: with the reduction over other dims."""
        self.submodule.put_saved(self._contexts.pop(microbatch))
        with ExitStack() if last else self._no_sync():
            return _gradients(self.submodule.backward(*grads))

    def backward_input(
        self, microbatch: int, grads: Sequence[Array | None]
    ) -> tuple[Array | None, ...]:
        """Run the module's backward without what its layers defer."""
        self.submodule.put_saved(self._contexts.pop(microbatch))
        with self._no_sync(), self.submodule.deferring() as later:
            result = _gradients(self.submodule.backward(*grads))
        self._weights[microbatch] = later
        return result

    def backward_weight(self, microbatch: int, *, last: bool) -> None:
        """Do what the layers have deferred; ``last``: with the reduction over other dims."""
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
        """Set the module's mode back."""
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
    """Yield the modules that reduce gradients, but not those below them."""
    if isinstance(module, DistributedDataParallel | FSDPModule):
        yield module
        return
    for _, child in module.named_children():
        yield from _outermost(child)
