"""The connection between parameters and the reducer that averages their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from meshlib import ProcessGroup
from parallel._arrays import Array, written
from parallel._core.buckets import GradientSpec, ReducerOptions
from parallel._core.reducer import Reducer, Scale
from parallel._core.replicas import check_same, describe_options
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter, RemovableHandle


def check_same_model(module: Module, group: ProcessGroup, **options: object) -> None:
    """Raise ValueError on every rank if parameters, buffers or ``options`` differ between ranks.

    The message names the first difference from rank 0 for each rank.
    """
    parameters = describe_parameters(module.named_parameters())
    buffers = [f"buffer {path} {written(b.data)}" for path, b in module.named_buffers()]
    check_same([*describe_options(**options), *parameters, *buffers], group)


def describe_parameters(named: Iterable[tuple[str, Parameter]]) -> list[str]:
    """Return a line with path, dtype, shape and frozen state for each parameter."""
    return [
        f"parameter {path} {written(p.data)}{'' if p.requires_grad else ' (frozen)'}"
        for path, p in named
    ]


class ParameterGradients:
    """The owner of gradients for a reducer: reports complete ones and writes averages back.

    With ``as_views``, gradients are views of the buckets.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        group: ProcessGroup,
        options: ReducerOptions,
        *,
        as_views: bool,
    ) -> None:
        self._parameters = [parameter for _, parameter in named]
        self._as_views = as_views
        self._specs = [GradientSpec.of(path, p.data, p) for path, p in named]
        self._options = options
        self.reducer: Reducer = Reducer(self._specs, group, options, self, self._trained())
        self._handles: list[RemovableHandle] = []
        self._listen()

    def move_to(self, group: ProcessGroup) -> None:
        """Average over ``group`` from the next pass on. Gradients are dropped."""
        for parameter in self._parameters:
            parameter.grad = None
            parameter.set_grad_home(None)
            parameter.uses = 0
        hook = self.reducer.hook
        self.reducer = Reducer(self._specs, group, self._options, self, self._trained())
        self.reducer.hook = hook
        self._listen()

    def begin(self, *, accumulated: bool = False) -> None:
        """Prepare for a backward pass whose forward has run.

        With ``accumulated``, an existing gradient that has no outstanding use is complete.

        Raises RuntimeError for parameters that the forward did not use (unless unused parameters
        are allowed) and after a failed pass; ValueError when the ranks froze different parameters.
        """
        trained = self._trained()
        idle = [number for number in trained if not self._parameters[number].uses]
        complete = [n for n in idle if accumulated and self._parameters[n].grad is not None]
        self.reducer.begin(trained, set(idle).difference(complete))
        for number in complete[::-1]:
            self.reducer.ready(number, self._parameters[number].grad)

    def shadow(self, scale: Scale) -> None:
        """Join in the collectives of the other ranks' pass, with gradients of zero."""
        trained = self._trained()
        for number in trained:
            self._parameters[number].grad = None
        self.reducer.shadow(trained, scale)

    def fail(self, error: BaseException) -> None:
        """Abort the current pass because of ``error``, and make all later ones fail."""
        self.reducer.fail(error)
        self._stop_listening()

    def _listen(self) -> None:
        self._stop_listening()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_complete, number))
            for number, parameter in enumerate(self._parameters)
        ]

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _trained(self) -> list[int]:
        return [n for n, parameter in enumerate(self._parameters) if parameter.requires_grad]

    def _on_complete(self, number: int, parameter: Parameter) -> None:
        self.reducer.ready(number, parameter.grad)

    # The reducer's GradientOwner protocol

    def accumulated(self, number: int) -> Array | None:
        """Return the parameter's gradient, or None if it has none."""
        return self._parameters[number].grad

    def rehome(self, views: Mapping[int, Array]) -> None:
        """With ``as_views``, store gradients in these ``views`` of new buckets."""
        if self._as_views:
            for number, parameter in enumerate(self._parameters):
                parameter.set_grad_home(views.get(number))

    def deliver(self, averages: Mapping[int, Array]) -> None:
        """Write a bucket's averages into the gradients."""
        for number, average in averages.items():
            parameter = self._parameters[number]
            if self._as_views:
                parameter.grad = average
            elif parameter.grad is None:
                parameter.grad = average.copy()
            else:
                parameter.grad[...] = average
