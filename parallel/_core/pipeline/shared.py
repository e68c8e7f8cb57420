"""Parameters that several stages have: equal in the beginning, and their gradients summed.

As Megatron-LM ties the input embedding to the output layer (Narayanan et al., arXiv:2104.04473,
section 4.3): each holder adds up all holders' gradients, in the order of the stages, so that all
get the same bits and every optimizer makes the same update.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from meshlib import ProcessGroup, Work
from parallel._arrays import Array, namespace, written
from parallel._groups import gathered

_TAG = 0x7069_7065 - 1


class SharedParameter(Protocol):
    """A parameter that stages share, on the rank of one of them."""

    grad: Array | None
    """The sum of the gradients since it was None, of the shape and dtype of ``data``."""

    @property
    def data(self) -> Array:
        """The values that the optimizer updates."""
        ...

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        ...


class _Holder(NamedTuple):
    stage: int
    rank: int
    described: str


class SharedParameters:
    """The shared parameters of this rank: ``own`` are (name, stage, parameter).

    Making it is a collective. Raises ValueError on all ranks when stages that share a name have
    parameters of other shapes or dtypes.
    """

    def __init__(
        self, own: Sequence[tuple[str, int, SharedParameter]], group: ProcessGroup
    ) -> None:
        self._group = group
        rank = group.rank()
        self._own: dict[str, dict[int, SharedParameter]] = {}
        for name, stage, parameter in own:
            mine = self._own.setdefault(name, {})
            if not any(parameter is other for other in mine.values()):  # shared here already
                mine[stage] = parameter
        listed = [
            (name, _Holder(stage, rank, _describe(parameter)))
            for name, mine in self._own.items()
            for stage, parameter in mine.items()
        ]
        told: list[list[tuple[str, _Holder]]] = gathered(listed, group)
        self._holders: dict[str, list[_Holder]] = {}
        for name, holder in itertools.chain.from_iterable(told):
            self._holders.setdefault(name, []).append(holder)
        for name, holders in sorted(self._holders.items()):
            holders.sort()
            _check(name, holders)
        self._before: dict[int, Array | None] = {}
        for name in sorted(self._own):
            self._begin_equal(name)

    def _begin_equal(self, name: str) -> None:
        """Give all holders the values of the first."""
        first, mine = self._holders[name][0], self._own[name]
        if first.rank == self._group.rank():
            value = mine[first.stage].data
            for rank in self._others(name):
                self._group.send(value, group_dst=rank, tag=_TAG)
        else:
            value = _like(mine)
            self._group.recv(value, group_src=first.rank, tag=_TAG)
        for parameter in mine.values():
            if parameter.data is not value:
                parameter.data[...] = value

    def _others(self, name: str) -> list[int]:
        return sorted({h.rank for h in self._holders[name]} - {self._group.rank()})

    def begin(self) -> None:
        """Put aside gradients of earlier steps, whose sum they are already."""
        for mine in self._own.values():
            for parameter in mine.values():
                grad = parameter.grad
                self._before[id(parameter)] = None if grad is None else grad.copy()
                parameter.grad = None

    def finish(self) -> None:
        """Sum the gradients of this step over the stages, and add what was put aside."""
        works: list[Work[Any] | None] = []
        coming: dict[tuple[str, int], Array] = {}
        for name, mine in sorted(self._own.items()):
            for parameter in mine.values():
                grad = parameter.grad
                if grad is None:
                    grad = namespace(parameter.data).zeros_like(parameter.data)
                    parameter.grad = grad
                for rank in self._others(name):
                    works.append(self._group.isend(grad, group_dst=rank, tag=_TAG))
            for holder in self._holders[name]:
                if holder.rank != self._group.rank():
                    coming[name, holder.stage] = array = _like(mine)
                    works.append(self._group.irecv(array, group_src=holder.rank, tag=_TAG))
        for work in works:
            if work is not None:
                work.wait()
        for name, mine in self._own.items():
            self._add_up(name, mine, coming)

    def _add_up(
        self, name: str, mine: dict[int, SharedParameter], coming: dict[tuple[str, int], Array]
    ) -> None:
        total = _like(mine)
        total[...] = 0
        for holder in self._holders[name]:
            here = mine.get(holder.stage)
            total += coming[name, holder.stage] if here is None else here.grad
        for parameter in mine.values():
            before = self._before.pop(id(parameter), None)
            grad = parameter.grad
            assert grad is not None, "it was zeros if there was none"
            grad[...] = total if before is None else total + before


def _like(mine: dict[int, SharedParameter]) -> Array:
    array = next(iter(mine.values())).data
    return namespace(array).empty_like(array)


def _check(name: str, holders: Sequence[_Holder]) -> None:
    if len({holder.described for holder in holders}) > 1:
        each = ", ".join(f"{holder.described} at stage {holder.stage}" for holder in holders)
        raise ValueError(f"shared parameter {name!r} is not the same everywhere: {each}")


def _describe(parameter: SharedParameter) -> str:
    frozen = "" if parameter.requires_grad else " (frozen)"
    return f"{written(parameter.data)}{frozen}"
