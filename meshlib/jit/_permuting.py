"""``permute``, whole and in two halves, between which the program computes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from meshlib._calls.work import Work
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import derived_group
from meshlib.jit._collective import InJit, bind
from meshlib.jit._kinds import Issuing, flat_of
from meshlib.jit._program import HostArray, HostFunction, Program, state_in_jit
from transport._call import Kind


@dataclass(frozen=True)
class Permute(Issuing):
    """Each pair (source, destination) moves one member's array; who gets none gets zeros.

    One call of all members, as an all-to-all with at most one part each way: its header carries a
    hash of the pairs and of ``tag``, so that members with others are found out.
    """

    kind = Kind.ALL_TO_ALL
    pairs: tuple[tuple[int, int], ...]
    tag: int = 0

    @cached_property
    def source(self) -> int | None:
        """Whose array comes to this member; None: zeros."""
        me = self.group.rank()
        return next((here for here, there in self.pairs if there == me), None)

    @cached_property
    def _destination(self) -> int | None:
        me = self.group.rank()
        return next((there for here, there in self.pairs if here == me), None)

    @property
    def has_result(self) -> bool:
        return self.source is not None

    @property
    def extra(self) -> int:
        return zlib.crc32(repr((self.tag, sorted(self.pairs))).encode())

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        size, flat = self._size, flat_of(x)
        outputs, inputs = [flat[:0]] * size, [flat[:0]] * size
        if self._destination is not None:
            inputs[self._destination] = flat
        if self.source is not None:
            outputs[self.source] = flat_of(output)
        return outputs, inputs

    def transposed(self) -> InJit:
        return Permute(self.group, tuple((there, here) for here, there in self.pairs))


class _UnderWay(NamedTuple):
    """A permute that was begun. It works on memory of its own: XLA's may be another by then."""

    work: Work[Any]
    came: HostArray
    program: Program
    break_off: Callable[[BaseException], None]


@dataclass(frozen=True)
class _Half(InJit):
    """A half of ``whole``; ``tag`` says which of those under way the other half belongs to.

    Made by a group beside, on the thread of which it goes on while the program does other things.
    """

    whole: Permute
    tag: int

    in_place = True

    def transposed(self) -> None:
        return None  # a tangent has no halves

    def beside(self) -> Permute:
        """Return the permute that is made."""
        group = derived_group(self.group, "passing", f"{self.group.group_desc}, passing")
        return replace(self.whole, group=group, tag=self.tag)


@dataclass(frozen=True)
class PermuteStart(_Half):
    """Returns its operand, of which a copy is on its way from then on."""

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        permute = self.beside()
        group, spec, tag = permute.group, permute.call_spec(x), self.tag

        def start(held: HostArray, program: Program) -> None:
            if type(held) is not np.ndarray:
                return  # see PermuteDone
            under_way = state_in_jit(group).under_way
            before = under_way.get(tag)
            if before is not None:
                before.break_off(
                    RuntimeError(f"no permute_done came before the next start, tag {tag}")
                )
            came = np.empty_like(held)
            work: Work[Any] = call_queue_of(group).issue(spec(came, held.copy()), async_op=True)
            under_way[tag] = _UnderWay(work, came, program, break_off)
            program.guard(break_off)

        def break_off(error: BaseException) -> None:
            _taken(group, tag)
            group.abort(f"a permute under way was broken off by {type(error).__name__}: {error}")

        return lambda outputs, _, program: start(outputs[0], program)

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        del x, y
        return t


@dataclass(frozen=True)
class PermuteDone(_Half):
    """Returns what has come, in the place of its operand, which was sent."""

    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        permute = self.beside()
        group, at_once, tag = permute.group, permute.host_side(x), self.tag

        def done(held: HostArray) -> None:
            if type(held) is not np.ndarray:
                # On a GPU the stream keeps the order, and the host is far ahead of it.
                at_once(held, held.copy())
                return
            under_way = _taken(group, tag)
            under_way.work.wait()
            held[...] = 0 if permute.source is None else under_way.came

        return lambda outputs, _, __: done(outputs[0])

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        del x, y
        return bind(self.whole, t)


def _taken(group: ProcessGroup, tag: int) -> _UnderWay:
    """Take what is under way out of the books. Raises RuntimeError if that is nothing."""
    under_way: _UnderWay | None = state_in_jit(group).under_way.pop(tag, None)
    if under_way is None:
        raise RuntimeError(f"permute_done with tag {tag}, but no permute_start before it: {group}")
    under_way.program.unguard(under_way.break_off)
    return under_way
