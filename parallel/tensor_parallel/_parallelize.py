"""``parallelize``, which splits a model over ranks by a plan, and conversions of activations."""

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
    # Copied because a module may return its own argument.
    return reduce(namespace(x).array(x, order="C"), group)


def _into(current: Placement, desired: Placement) -> _Crossing:
    """Return the crossing into a region in which each rank computes its part of a layer.

    Backward sums the ranks' gradients.
    """
    match current, desired:
        case Shard(dim), Replicate():
            return _Crossing(partial(gather, dim=dim), partial(reduce, dim=dim))
        case Replicate(), Replicate():
            return _Crossing(_same, _reduced)
        case Replicate(), Shard(dim):
            return _Crossing(partial(split, dim=dim), partial(gather, dim=dim))
        case _:
            raise _unknown("input", current, desired, "Shard to Replicate, Replicate to either")


def _out_of(current: Placement, desired: Placement) -> _Crossing:
    """Return the crossing out of such a region. Gradients are whole, so backward sums nothing."""
    match current, desired:
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
            raise _unknown("output", current, desired, known)


def _unknown(what: str, current: object, desired: object, known: str) -> ValueError:
    return ValueError(
        f"{what}_layouts {current} cannot become desired_{what}_layouts {desired}; expected {known}"
    )


def _crossings(
    current: Layouts,
    desired: Layouts,
    make: Callable[[Placement, Placement], _Crossing],
    what: str,
) -> tuple[_Crossing | None, ...]:
    first, second = _tuple(current), _tuple(desired)
    if len(first) != len(second):
        raise ValueError(
            f"{what}_layouts has {len(first)} entries, desired_{what}_layouts {len(second)};"
            f" expected one in each for every {what}"
        )
    crossings: list[_Crossing | None] = []
    for source, target in zip(first, second, strict=True):
        for layout in (source, target):
            if layout is not None and not isinstance(layout, Placement):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"{what}_layouts must be Shard(dim), Replicate(), Partial() or None, got"
                    f" {describe(layout)}"
                )
        if (source is None) != (target is None):
            raise ValueError(
                f"{what}_layouts {source} and desired_{what}_layouts {target}: expected None in"
                f" both, for an {what} that does not change, or in neither"
            )
        crossings.append(None if source is None or target is None else make(source, target))
    return tuple(crossings)


class PreparedModule(Module):
    """A module with prepared inputs or outputs; it remains an instance of its own class as well."""

    _inputs: tuple[_Crossing | None, ...] = ()
    _outputs: tuple[_Crossing | None, ...] = ()
    _over: ProcessGroup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the inputs, call the module, and convert the outputs."""
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
                f"{type(self).__name__} has {len(values)} {what}, but its plan has layouts for"
                f" {len(crossings)}"
            )
        converted = [
            value
            if crossing is None or value is None
            else (crossing.backward if backward else crossing.forward)(value, self._over)
            for value, crossing in zip(values, crossings, strict=False)
        ]
        return (*converted, *values[len(converted) :])


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
            raise ValueError(f"{path!r} is prepared by another plan already")

    def apply(self, module: Module, parts: Parts, prepared: bool) -> None:
        del prepared
        module.__class__ = cast(Any, _prepared_class(type(module)))
        vars(module).update({"_over": parts.group, self.crossed: self.crossings()})


@dataclass(frozen=True)
class PrepareModuleInput(_Prepare):
    """Convert the positional inputs of any module to other layouts.

    The module becomes a region in which each rank computes a part, and backward sums the gradients
    of the ranks. Several layers in it that share the input, such as the projections of attention,
    thus need only one gather (forward) and one reduce-scatter (backward).

    Args:
        input_layouts: The layouts of the inputs: ``Shard(1)``, this rank's part of the sequence, or
            ``Replicate()``. For several inputs, a tuple, with None for inputs that do not change.
        desired_input_layouts: The layouts that the module needs, likewise. ``Shard(dim)`` to
            ``Replicate()`` costs an all-gather forward and a reduce-scatter backward.
            ``Replicate()`` to ``Replicate()`` costs an all-reduce backward, and to ``Shard(dim)``
            an all-gather backward.

    Raises ValueError for layouts that do not match, TypeError for objects that are not layouts.
    """

    crossed = "_inputs"
    input_layouts: Layouts
    desired_input_layouts: Layouts

    def crossings(self) -> tuple[_Crossing | None, ...]:
        return _crossings(self.input_layouts, self.desired_input_layouts, _into, "input")


@dataclass(frozen=True)
class PrepareModuleOutput(_Prepare):
    """Convert the outputs of any module to other layouts.

    This ends the region in which each rank computes its part. Later layers compute the same values
    on all ranks, or work on parts of the sequence.

    Args:
        output_layouts: The layouts of the outputs: ``Shard(dim)``, ``Replicate()`` or ``Partial()``
            (each rank has a summand). For several outputs, a tuple, with None for outputs that do
            not change.
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
    """Return whether one of ``styles`` makes inputs whole, and sums their gradients."""
    return any(
        isinstance(style, PrepareModuleInput)
        and any(isinstance(x, Replicate) for x in _tuple(style.desired_input_layouts))
        for style in styles
    )


def _tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return layouts if isinstance(layouts, tuple) else (layouts,)


_M = TypeVar("_M", bound=Module)


def parallelize(module: _M, mesh: GroupLike | None, plan: Mapping[str, ParallelStyle]) -> _M:
    """Split ``module`` over the ranks of ``mesh`` by ``plan``, in place, and return it.

    Each rank keeps its part of the split parameters, under the same names; shared parameters remain
    shared. All ranks must pass the same samples. Apply it to a whole model with the same values on
    all ranks, before ``fully_shard`` and ``DistributedDataParallel``, which use other dims of the
    mesh::

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
        plan: A style for each name of a module below ``module``; "" is the module itself. ``*``,
            ``?`` and ``[...]`` match as in file names, within one part between dots.

    Returns:
        The ``module``.

    Raises:
        ValueError: For a name that no module has (the error suggests similar names), or two names
            that match one module. Also for a size that is not divisible by the number of ranks, or
            parameters that are split already. Nothing is changed or sent.
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
    """Yield the paths of the modules that contain the module at ``path``; the root, "", is last."""
    while path:
        path = path.rpartition(".")[0]
        yield path
