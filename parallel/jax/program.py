"""A traced loss with its gradients, run step by step with parameters that come and go.

The loss and its derivative are traced once, as if all parameters were there. Then the operations
are repeated, in their order, into the program of the caller: before the first one in forward that
uses a parameter it is gathered, after the last one it is dropped; the same in backward; and each
gradient is handed over as soon as it has been computed. So the order of gathers is that of the
operations, the same on all ranks, and no more parameters are whole at a time than one operation
needs and the next one's, however the loss is written. What only lays a parameter out anew (its
transpose, a cast) is made again in backward, where it would otherwise keep the whole alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal, Primitive

Gather = Callable[[int, Any], Any]
"""``gather(number, after)``: the whole parameter; not before the array ``after`` is there."""

Reduce = Callable[[int, Any], Any]
"""``reduce(number, gradient)``: what becomes of a whole gradient."""

_LAYOUT = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "expand_dims",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)


def _same(x: Any) -> Any:
    return x


_boundary_p = Primitive("meshlib_backward_begins")
_boundary_p.def_impl(_same)
_boundary_p.def_abstract_eval(_same)


def backward_begins(value: Any) -> Any:
    """Return ``value``; in a traced program all operations after this belong to backward."""
    return _boundary_p.bind(value)


@dataclass
class _Step:
    """One operation; inputs are numbers of values, or literals."""

    eqn: Any
    inputs: list[Any]
    outputs: list[int]

    @property
    def names(self) -> list[int]:
        return [name for name in self.inputs if isinstance(name, int)]

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        primitive = self.eqn.primitive
        if primitive is _boundary_p:
            return inputs
        given = primitive.get_bind_params(self.eqn.params)
        functions, params = given if isinstance(given, tuple) else ((), given)  # until JAX 0.9
        with self.eqn.ctx.manager:
            results = primitive.bind(*functions, *inputs, **params)
        return results if primitive.multiple_results else [results]


@dataclass
class _Flat:
    """The operations of a program, with those of jitted functions in their places."""

    steps: list[_Step] = field(default_factory=list["_Step"])
    constants: dict[int, Any] = field(default_factory=dict[int, Any])
    count: int = 0

    def new(self) -> int:
        self.count += 1
        return self.count

    def add(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        names: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            names[var] = number = self.new()
            self.constants[number] = constant

        def find(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else names[atom]

        for eqn in jaxpr.eqns:
            given = [find(atom) for atom in eqn.invars]
            inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
            if inner is not None:
                outputs = self.add(inner.jaxpr, inner.consts, given)
            else:
                outputs = [self.new() for _ in eqn.outvars]
                self.steps.append(_Step(eqn, given, outputs))
            names.update(zip(eqn.outvars, outputs, strict=True))
        return [find(atom) for atom in jaxpr.outvars]


class Program:
    """What ``function`` does, a function of ``count`` parameters of the given ``specs``.

    It returns a pytree, whose leaves end with the gradients of the parameters, in their order. It
    may use values of the trace in which this is made.
    """

    def __init__(self, function: Callable[..., Any], specs: Sequence[jax.ShapeDtypeStruct]) -> None:
        closed, self._shape = jax.make_jaxpr(function, return_shape=True)(*specs)
        flat = _Flat()
        self._params = [flat.new() for _ in specs]
        self._outputs = flat.add(closed.jaxpr, closed.consts, self._params)
        self._steps, self._constants = flat.steps, flat.constants
        self._drop_unused()
        self._find_layouts()

    def _drop_unused(self) -> None:
        used = {name for name in self._outputs if isinstance(name, int)}
        kept: list[_Step] = []
        for step in reversed(self._steps):
            if step.eqn.effects or not used.isdisjoint(step.outputs):
                kept.append(step)
                used.update(step.names)
        self._steps = kept[::-1]

    def _find_layouts(self) -> None:
        """Find which values are layouts of parameters, and when they are used last in a phase."""
        self._owner = {name: number for number, name in enumerate(self._params)}
        self._layouts: dict[int, _Step] = {}
        self._last: dict[tuple[int, int], int] = {}
        phase = 0
        for place, step in enumerate(self._steps):
            if step.eqn.primitive is _boundary_p:
                phase = 1
            owners = [self._owner[name] for name in step.names if name in self._owner]
            if step.eqn.primitive.name in _LAYOUT and len(step.names) == 1 and owners:
                self._layouts[step.outputs[0]] = step
                self._owner[step.outputs[0]] = owners[0]
                continue
            for owner in owners:
                self._last[owner, phase] = place

    def run(self, gather: Gather, reduce: Reduce, *, keep: bool) -> Any:
        """Return what the function returns, with reduced gradients.

        With ``keep`` parameters are gathered once, and stay until backward has used them.
        """
        run = _Run(gather, dict(self._constants), self._owner, self._layouts)
        count = len(self._outputs) - len(self._params)
        wanted: dict[int, list[int]] = {}
        for number, name in enumerate(self._outputs[count:]):
            if isinstance(name, int):
                wanted.setdefault(name, []).append(number)
        reduced: dict[int, Any] = {}
        phase = 0
        for place, step in enumerate(self._steps):
            if step.eqn.primitive is _boundary_p:
                phase = 1
            if step.outputs[:1] and step.outputs[0] in self._layouts:
                continue
            run.perform(step)
            for name in step.outputs:
                for number in wanted.get(name, ()):
                    reduced[number] = reduce(number, run.value(name))
            for number in {self._owner[name] for name in step.names if name in self._owner}:
                if not keep and self._last.get((number, phase)) == place:
                    run.drop(number)
        results = [run.value(name) for name in self._outputs[:count]]
        for number, name in enumerate(self._outputs[count:]):
            if number not in reduced:
                reduced[number] = reduce(number, run.value(name))
        results += [reduced[number] for number in range(len(self._params))]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self._shape), results)


@dataclass
class _Run:
    """The values of one run."""

    gather: Gather
    values: dict[int, Any]
    owner: dict[int, int]
    layouts: dict[int, _Step]
    before: Any = None
    latest: Any = None

    def value(self, name: Any) -> Any:
        """Return a value; a parameter is gathered, if it is not there."""
        if isinstance(name, Literal):
            return name.val
        if name not in self.values:
            step = self.layouts.get(name)
            if step is None:
                # It may come as soon as the one before could: while that one is computed with.
                self.values[name] = self.gather(self.owner[name], self.before)
                self.before = self.latest
            else:
                (self.values[name],) = step.run([self.value(given) for given in step.inputs])
        return self.values[name]

    def perform(self, step: _Step) -> None:
        """Compute the outputs of an operation."""
        results = step.run([self.value(name) for name in step.inputs])
        for name, result in zip(step.outputs, results, strict=True):
            self.values[name] = result
            if getattr(result, "size", 0) and jax.numpy.issubdtype(result.dtype, jax.numpy.number):
                self.latest = result

    def drop(self, number: int) -> None:
        """Forget the whole parameter, and what was laid out of it."""
        for name, owner in self.owner.items():
            if owner == number:
                self.values.pop(name, None)
