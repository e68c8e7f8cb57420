"""What is measured: one collective each, on float32, with a result that is known in advance.

Written against c10d's names, which every library here has. Values are small integers, so sums are
exact and the check can be, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Wrap = Callable[[Floats], Any]
"""Makes a library's array over the memory of a NumPy array."""

_PERIOD = 251


def _values(count: int, rank: int) -> Floats:
    return (np.arange(count) % _PERIOD + rank).astype(np.float32)


class Case(ABC):
    """One collective at one size on one rank of ``size``.

    ``nbytes`` is the size of each rank's input (of the root's for a broadcast), rounded up to
    whole elements for each rank. ``run`` is what is timed; ``reset`` comes before it, ``is_right``
    after.
    """

    name: ClassVar[str]

    def __init__(self, nbytes: int, rank: int, size: int, wrap: Wrap) -> None:
        each = max(1, -(-nbytes // (4 * size))) if self._split else max(1, -(-nbytes // 4))
        self.rank = rank
        self.size = size
        self.each = each
        self._source = _values(each * size if self._split else each, rank)
        self.input = self._source.copy()
        self.input_array = wrap(self.input)
        self.output = self._make_output()
        self.output_array = wrap(self.output)

    _split: ClassVar[bool] = False
    """Whether the input has a part for each rank."""

    def _make_output(self) -> Floats:
        return self.input

    def reset(self) -> None:
        """Bring the input back to what it was."""
        np.copyto(self.input, self._source)

    @abstractmethod
    def run(self, dist: Any) -> None:
        """Make the call, with ``dist`` in the role of ``torch.distributed``."""

    @abstractmethod
    def expected(self) -> Floats:
        """Return what ``output`` must hold after ``run``."""

    def is_right(self) -> bool:
        """Return whether the last ``run`` gave the right result."""
        return np.array_equal(self.output, self.expected())


class AllReduce(Case):
    """Sums, in place."""

    name = "all_reduce"

    def run(self, dist: Any) -> None:  # noqa: D102
        dist.all_reduce(self.input_array)

    def expected(self) -> Floats:  # noqa: D102
        others = sum(range(self.size))
        return _values(self.each, 0) * np.float32(self.size) + np.float32(others)


class Broadcast(Case):
    """From rank 0."""

    name = "broadcast"

    def run(self, dist: Any) -> None:  # noqa: D102
        dist.broadcast(self.input_array, 0)

    def expected(self) -> Floats:  # noqa: D102
        return _values(self.each, 0)


class AllGather(Case):
    """Into one array."""

    name = "all_gather"

    def _make_output(self) -> Floats:
        return np.zeros(self.each * self.size, np.float32)

    def run(self, dist: Any) -> None:  # noqa: D102
        dist.all_gather_into_tensor(self.output_array, self.input_array)

    def expected(self) -> Floats:  # noqa: D102
        return np.concatenate([_values(self.each, rank) for rank in range(self.size)])


class ReduceScatter(Case):
    """Sums of one array's parts."""

    name = "reduce_scatter"
    _split = True

    def _make_output(self) -> Floats:
        return np.zeros(self.each, np.float32)

    def run(self, dist: Any) -> None:  # noqa: D102
        dist.reduce_scatter_tensor(self.output_array, self.input_array)

    def expected(self) -> Floats:  # noqa: D102
        begin = self.rank * self.each
        whole = _values(self.each * self.size, 0) * np.float32(self.size)
        return whole[begin : begin + self.each] + np.float32(sum(range(self.size)))


class AllToAll(Case):
    """Equal parts of one array."""

    name = "all_to_all"
    _split = True

    def _make_output(self) -> Floats:
        return np.zeros(self.each * self.size, np.float32)

    def run(self, dist: Any) -> None:  # noqa: D102
        dist.all_to_all_single(self.output_array, self.input_array)

    def expected(self) -> Floats:  # noqa: D102
        part = slice(self.rank * self.each, (self.rank + 1) * self.each)
        whole = _values(self.each * self.size, 0)
        return np.concatenate([whole[part] + np.float32(rank) for rank in range(self.size)])


class PingPong(Case):
    """A message from rank 0 to rank 1 and back; the other ranks look on."""

    name = "ping_pong"

    def run(self, dist: Any) -> None:  # noqa: D102
        if self.rank == 0:
            dist.send(self.input_array, 1)
            dist.recv(self.input_array, 1)
        elif self.rank == 1:
            dist.recv(self.input_array, 0)
            dist.send(self.input_array, 0)

    def expected(self) -> Floats:  # noqa: D102
        return _values(self.each, 0 if self.rank < 2 else self.rank)


class Barrier(Case):
    """Moves no data."""

    name = "barrier"

    def run(self, dist: Any) -> None:  # noqa: D102
        dist.barrier()

    def expected(self) -> Floats:  # noqa: D102
        return self._source


CASES: dict[str, type[Case]] = {
    case.name: case
    for case in (AllReduce, Broadcast, AllGather, ReduceScatter, AllToAll, PingPong, Barrier)
}
