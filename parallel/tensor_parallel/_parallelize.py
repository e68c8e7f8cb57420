"""Splitting a model over ranks by a plan of names and styles, and converting activations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from meshlib import ProcessGroup
from meshlib.sharding import Partial, Replicate, Shard
from parallel._arrays import Array, namespace
from parallel._checks import check_instance, describe
from parallel._groups import GroupLike
from parallel._nested import meant_by
from parallel.nn._module import Module
from parallel.tensor_parallel._parts import Parts, Placement, gather, reduce, split
from parallel.tensor_parallel._styles import ParallelStyle

Layouts = Placement | None | tuple[Placement | None, ...]
Cross = Callable[[Array, ProcessGroup], Array]


class _Crossing(NamedTuple):
    """A conversion of an array in forward, and the conversion of its gradient in backward."""

    forward: Cross
    backward: Cross


def _same(x: Array, group: ProcessGroup) -> Array:
    del group
    return x


def _reduced(x: Array, group: ProcessGroup) -> Array:
    # A copy: a module may return its own argument.
    return reduce(namespace(x).array(x, order="C"), group)


def _into(given: Placement, wanted: Placement) -> _Crossing:
    """Return the crossing into a region in which each rank computes its part of a layer.

    Backward sums the ranks' gradients.
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
    """Return the crossing out of such a region. Backward sums nothing: gradients are whole."""
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
    """A module with prepared inputs or outputs: it also stays an instance of its own class."""

    _inputs: tuple[_Crossing | None, ...] = ()
    _outputs: tuple[_Crossing | None, ...] = ()
    _over: ProcessGroup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Lay out the inputs anew, and what the module makes of them."""
        inputs = self._crossed("inputs", args, self._inputs, backward=False)
        outputs = super().forward(*inputs, **kwargs)
        return self._crossed("outputs", outputs, self._outputs, backward=False)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
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
    """The attribute of a ``PreparedModule`` that holds the crossings."""

    def __post_init__(self) -> None:
        self.crossings()

    @abstractmethod
    def crossings(self) -> tuple[_Crossing | None, ...]:
        """Return the crossing of each array, or None for an array without one."""

    def check(self, module: Module, path: str, parts: Parts) -> None:
        del parts
        if isinstance(module, PreparedModule):
            raise ValueError(f"{path!r} was prepared by another plan before")

    def apply(self, module: Module, parts: Parts, prepared: bool) -> None:
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
        input_layouts: The layouts of the inputs: ``Shard(1)``, this rank's part of the sequence, or
            ``Replicate()``; a tuple for several, with None for those to leave alone.
        desired_input_layouts: The layouts that the module needs, likewise. ``Shard(dim)`` to
            ``Replicate()`` costs an all-gather forward and a reduce-scatter backward.
            ``Replicate()`` to ``Replicate()`` costs an all-reduce backward, and to ``Shard(dim)``
            an all-gather backward.

    Raises ValueError for layouts that do not match, TypeError for what is none.
    """

    crossed = "_inputs"
    input_layouts: Layouts
    desired_input_layouts: Layouts

    def crossings(self) -> tuple[_Crossing | None, ...]:
        return _crossings(self.input_layouts, self.desired_input_layouts, _into, "input")


@dataclass(frozen=True)
class PrepareModuleOutput(_Prepare):
    """Convert the outputs of any module to other layouts.

    Here the region ends in which each rank computes its part. The layers after it compute the same
    on all ranks, or work on parts of the sequence.

    Args:
        output_layouts: The layouts of the outputs: ``Shard(dim)``, ``Replicate()`` or ``Partial()``
            (each rank has a summand); a tuple for several, with None for those to leave alone.
        desired_output_layouts: The layouts to convert to, likewise. ``Shard(dim)`` to
            ``Replicate()`` costs an all-gather forward, and ``Replicate()`` to ``Shard(dim)`` one
            backward. ``Partial()`` to ``Replicate()`` costs an all-reduce forward. ``Partial()`` to
            ``Shard(dim)`` costs a reduce-scatter forward and an all-gather backward.

    Raises ValueError for layouts that do not match, TypeError for objects that are not layouts.
    """

    crossed = "_outputs"
    output_layouts: Layouts
    desired_output_layouts: Layouts

    def crossings(self) -> tuple[_Crossing | None, ...]:
        return _crossings(self.output_layouts, self.desired_output_layouts, _out_of, "output")


def prepares_whole_input(styles: Iterable[ParallelStyle]) -> bool:
    """Return whether one of ``styles`` gives a module its whole input, and sums the gradients."""
    return any(
        isinstance(style, PrepareModuleInput)
        and any(isinstance(x, Replicate) for x in _tuple(style.desired_input_layouts))
        for style in styles
    )


def _tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return layouts if isinstance(layouts, tuple) else (layouts,)


_M = TypeVar("_M", bound=Module)


def parallelize(module: _M, mesh: GroupLike | None, plan: Mapping[str, ParallelStyle]) -> _M:
    """Split ``module`` over the ranks of ``mesh`` as ``plan`` says, and return it.

    The modules are changed in place. Each rank keeps its part of the split parameters, under the
    same names; shared parameters stay shared. All ranks must pass the same samples. Apply it to a
    whole model with the same values on all ranks, before ``fully_shard`` and
    ``DistributedDataParallel``, which take the other dims of the mesh::

        parallelize(model, mesh["tp"], {
            "embedding": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.norm": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(Shard(1), Replicate()),
            "blocks.*.attention.query": ColwiseParallel(),
            ...
        })

    Args:
        module: A ``parallel.nn.Module``.
        mesh: The ranks: ``mesh["tp"]``, a process group, or None for the default group.
        plan: A style for each name of a module below ``module``; "" is the module itself. The
            patterns ``*``, ``?`` and ``[...]`` match as in file names, within one part between
            dots.

    Returns:
        The ``module``.

    Raises:
        ValueError: For a name that no module has (the error suggests the nearest), or two names
            that match one module. For a size that the number of ranks does not divide, and for
            parameters that are split already. Nothing was changed or sent then.
        TypeError: For an argument of the wrong type, or a style that does not support its module.
    """
    check_instance(module, Module, "module")
    parts = Parts(mesh)
    styles = _matched(module, plan)
    modules = dict(module.named_modules())
    for path, style in styles.items():
        style.check(modules[path], path, parts)
    for path, style in styles.items():
        around = [styles[above] for above in _above(path) if above in styles]
        style.apply(modules[path], parts, prepares_whole_input(around))
    return module


def _matched(module: Module, plan: Any) -> dict[str, ParallelStyle]:
    if not isinstance(plan, Mapping):
        raise TypeError(
            "plan must be a dict of names and styles, such as {'blocks.*.up': ColwiseParallel()},"
            f" got {describe(plan)}"
        )
    for name, style in cast(Mapping[Any, Any], plan).items():
        check_instance(name, str, f"the name {name!r} in plan")
        check_instance(style, ParallelStyle, f"plan[{name!r}]", "ColwiseParallel()")
    paths = {path: [path] for path, _ in module.named_modules()}
    return meant_by(cast(Mapping[str, ParallelStyle], plan), paths, "no module has")


def _above(path: str) -> Iterable[str]:
    """Yield the paths of the modules that the one at ``path`` is in, the module itself last."""
    while path:
        path = path.rpartition(".")[0]
        yield path
