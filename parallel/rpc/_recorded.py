"""Recorded values, the results of functions in an autograd context."""

from __future__ import annotations

from typing import Any, NoReturn

from meshlib import rpc
from parallel._checks import describe
from parallel.rpc._contexts import Context, context_store
from parallel.rpc._graph import Edge, ReceivedNode


class Recorded:
    """An array that was computed in an autograd context, on this or another worker.

    ``dist_autograd.forward`` and recorded calls return these. ``value`` is the array itself,
    without its history. Recorded values may be passed to ``forward`` (including decorated
    ``function``s), to ``backward``, and in remote calls and their results. ``float`` converts a
    loss to a number. A use as an array, which would silently lose the gradient, raises TypeError.
    """

    __slots__ = ("context", "edge", "value")

    def __init__(self, value: Any, context: Context, edge: Edge) -> None:
        self.value: Any = value
        self.context: Context = context
        self.edge: Edge = edge

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(getattr(self.value, "shape", ()))

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return getattr(self.value, "dtype", float)

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"Recorded({self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        to = rpc.pickled_for()
        if to is None:
            raise RuntimeError(
                "a recorded value can only be pickled in a remote call's arguments or result,"
                " because its gradient must return; expected its .value"
            )
        origin, number = self.context.send(self.edge, to)
        return received, (self.context.id, origin, number, self.value)

    def _refuse(self) -> NoReturn:
        raise TypeError(
            f"a recorded value ({describe(self.value)}) was used as an array, which would lose its"
            " gradient; expected dist_autograd.forward(function, value, ...), or its .value if"
            " no gradient is needed"
        )

    @property
    def __jax_array__(self) -> NoReturn:
        self._refuse()

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        self._refuse()


def received(context_id: int, origin: int, number: int, value: Any) -> Recorded:
    """Return a recorded value received from the worker ``origin``."""
    context = context_store().enter(context_id)
    return Recorded(value, context, Edge(ReceivedNode(origin, number), 0))
