"""Laying out anew what goes into a module, or comes out of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple, cast

from meshlib import ProcessGroup
from meshlib.sharding import Partial, Replicate, Shard
from parallel._arrays import Array, namespace
from parallel._checks import describe
from parallel.nn._module import Module
from parallel.tensor_parallel._parts import Parts, Placement, gather, reduce, split
from parallel.tensor_parallel._styles import ParallelStyle

Layouts = Placement | None | tuple[Placement | None, ...]
Cross = Callable[[Array, ProcessGroup], Array]


class _Crossing(NamedTuple):
    """What is made of an array in forward, and of its gradient in backward."""

    forward: Cross
    backward: Cross


def _same(x: Array, group: ProcessGroup) -> Array:
    del group
    return x


def _reduced(x: Array, group: ProcessGroup) -> Array:
    # A copy: what a module returned, it may have been given.
    return reduce(namespace(x).array(x, order="C"), group)


def _into(given: Placement, wanted: Placement) -> _Crossing:
    """Return how an activation enters a region in which each rank computes its part of a layer.

    The gradients that come back are to be summed over the ranks.
    """
    match given, wanted:
        case Shard(dim), Replicate():
            return _Crossing(partial(gather, dim=dim), partial(reduce, dim=dim))
        case Replicate(), Replicate():
            return _Crossing(_same, _reduced)
        case Replicate(), Shard(dim):
            return _Crossing(partial(split, dim=dim), partial(gather, dim=dim))
        case _:
            raise _unknown("input", given, wanted, "Shard to Replicate, Replicate to either")


def _out_of(given: Placement, wanted: Placement) -> _Crossing:
    """Return how an activation leaves such a region: what comes back is its gradient already."""
    match given, wanted:
        case Shard(dim), Replicate():
            return _Crossing(partial(gather, dim=dim), partial(split, dim=dim))
        case Replicate(), Shard(dim):
            return _Crossing(partial(split, dim=dim), partial(gather, dim=dim))
        case Partial("sum"), Replicate():
            return _Crossing(_reduced, _same)
        case Partial("sum"), Shard(dim):
            return _Crossing(partial(reduce, dim=dim), partial(gather, dim=dim))
        case _:
            known = "Shard to Replicate, Replicate to Shard, Partial('sum') to either"
            raise _unknown("output", given, wanted, known)


def _unknown(what: str, given: object, wanted: object, known: str) -> ValueError:
    return ValueError(
        f"{what}_layouts {given} cannot become desired_{what}_layouts {wanted}; expected {known}"
    )


def _crossings(
    given: Layouts,
    wanted: Layouts,
    make: Callable[[Placement, Placement], _Crossing],
    what: str,
) -> tuple[_Crossing | None, ...]:
    first, second = _tuple(given), _tuple(wanted)
    if len(first) != len(second):
        raise ValueError(
            f"{what}_layouts has {len(first)} entries, desired_{what}_layouts {len(second)};"
            f" expected one in each for every {what}"
        )
    made: list[_Crossing | None] = []
    for one, other in zip(first, second, strict=True):
        for layout in (one, other):
            if layout is not None and not isinstance(layout, Placement):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"{what}_layouts must be Shard(dim), Replicate(), Partial() or None, got"
                    f" {describe(layout)}"
                )
        if (one is None) != (other is None):
            raise ValueError(
                f"{what}_layouts {one} and desired_{what}_layouts {other}: expected None in both,"
                " for what stays as it is, or in neither"
            )
        made.append(None if one is None or other is None else make(one, other))
    return tuple(made)


class PreparedModule(Module):
    """What a plan makes of a module whose input or output it prepares: of its class besides."""

    _inputs: tuple[_Crossing | None, ...] = ()
    _outputs: tuple[_Crossing | None, ...] = ()
    _over: ProcessGroup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Lay out the inputs anew, and what the module makes of them."""
        inputs = self._crossed("inputs", args, self._inputs, backward=False)
        outputs = super().forward(*inputs, **kwargs)
        return self._crossed("outputs", outputs, self._outputs, backward=False)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Lay out the outputs' gradients anew, and those of the inputs."""
        grads = self._crossed("gradients of outputs", args, self._outputs, backward=True)
        back = super().backward(*grads, **kwargs)
        return self._crossed("gradients of inputs", back, self._inputs, backward=True)

    def _crossed(
        self,
        what: str,
        values: Any,
        crossings: tuple[_Crossing | None, ...],
        *,
        backward: bool,
    ) -> Any:
        if not isinstance(values, tuple):
            return self._crossed(what, (values,), crossings, backward=backward)[0]
        values = cast(tuple[Any, ...], values)
        if len(values) < len(crossings):
            raise ValueError(
                f"{type(self).__name__} has {len(values)} {what}, its plan layouts for"
                f" {len(crossings)}"
            )
        done = [
            value
            if crossing is None or value is None
            else (crossing.backward if backward else crossing.forward)(value, self._over)
            for value, crossing in zip(values, crossings, strict=False)
        ]
        return (*done, *values[len(done) :])


@cache
def _prepared_class(kind: type[Module]) -> type[Module]:
    return type(f"Prepared{kind.__name__}", (PreparedModule, kind), {"__module__": kind.__module__})


class _Prepare(ParallelStyle):
    crossed: ClassVar[str]
    """Which attribute of a ``PreparedModule`` says what is done."""

    def __post_init__(self) -> None:
        self.crossings()

    @abstractmethod
    def crossings(self) -> tuple[_Crossing | None, ...]:
        """Return what is done to each array."""

    def check(self, module: Module, path: str, parts: Parts) -> None:
        """Raise for a ``module``, at ``path``, that was prepared before; ``parts`` are any."""
        del parts
        if isinstance(module, PreparedModule):
            raise ValueError(f"{path!r} was prepared by another plan before")

    def apply(self, module: Module, parts: Parts, prepared: bool) -> None:
        """Have ``module`` lay these arrays out over ``parts``; ``prepared`` does not matter."""
        del prepared
        module.__class__ = cast(Any, _prepared_class(type(module)))
        vars(module).update({"_over": parts.group, self.crossed: self.crossings()})


@dataclass(frozen=True)
class PrepareModuleInput(_Prepare):
    """Lay out the positional inputs of a module anew, whatever it is, before it runs.

    It enters a region in which each rank computes a part of the module: gradients come back from
    the ranks as summands. So several layers in it that share the input, such as the projections of
    attention, need one gather (forward) and one reduce-scatter (backward) together.

    Args:
        input_layouts: how the inputs come: ``Shard(1)``, this rank's part of the sequence, or
            ``Replicate()``; a tuple for several, with None for those that stay as they are.
        desired_input_layouts: how the module wants them, likewise. ``Shard(dim)`` to
            ``Replicate()`` costs an all-gather forward and a reduce-scatter backward,
            ``Replicate()`` to ``Replicate()`` an all-reduce backward, ``Replicate()`` to
            ``Shard(dim)`` an all-gather backward.

    Raises ValueError for layouts that do not match, TypeError for what is none.
    """

    crossed = "_inputs"
    input_layouts: Layouts
    desired_input_layouts: Layouts

    def crossings(self) -> tuple[_Crossing | None, ...]:
        """Return what is done to each input."""
        return _crossings(self.input_layouts, self.desired_input_layouts, _into, "input")


@dataclass(frozen=True)
class PrepareModuleOutput(_Prepare):
    """Lay out the outputs of a module anew, whatever it is, after it has run.

    It leaves the region in which each rank computes a part: what comes after it is the same on all
    ranks, or goes on with parts of the sequence.

    Args:
        output_layouts: how the outputs come: ``Shard(dim)``, ``Replicate()`` or ``Partial()``, a
            summand of each rank; a tuple for several, with None for those that stay as they are.
        desired_output_layouts: how they are wanted, likewise. ``Shard(dim)`` to ``Replicate()``
            costs an all-gather forward, ``Replicate()`` to ``Shard(dim)`` one backward,
            ``Partial()`` to ``Replicate()`` an all-reduce forward, and to ``Shard(dim)`` a
            reduce-scatter forward and an all-gather backward.

    Raises ValueError for layouts that do not match, TypeError for what is none.
    """

    crossed = "_outputs"
    output_layouts: Layouts
    desired_output_layouts: Layouts

    def crossings(self) -> tuple[_Crossing | None, ...]:
        """Return what is done to each output."""
        return _crossings(self.output_layouts, self.desired_output_layouts, _out_of, "output")


def prepares_whole_input(styles: Iterable[ParallelStyle]) -> bool:
    """Return whether one of ``styles`` gives a module its whole input, to be summed up after."""
    return any(
        isinstance(style, PrepareModuleInput)
        and any(isinstance(x, Replicate) for x in _tuple(style.desired_input_layouts))
        for style in styles
    )


def _tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return layouts if isinstance(layouts, tuple) else (layouts,)
