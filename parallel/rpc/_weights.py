"""``Weights``: what is trained of functions of JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshlib import rpc
from parallel._checks import describe
from parallel.rpc._contexts import Context, keeper
from parallel.rpc._graph import Edge, Node, Recorded


class Weights:
    """A pytree of JAX arrays that is trained, kept on one worker: ``value``.

    Optimizers replace ``value``; each ``forward`` takes the one there is. Refer to it by an RRef,
    ``rpc.remote(to, Weights, (value,))``. In remote calls it travels by value: as recorded arrays
    where the thread is in an autograd context, so that gradients come back to it.

    Raises TypeError for leaves that are not arrays of floating point or complex numbers.
    """

    def __init__(self, value: Any) -> None:
        import jax

        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            where = jax.tree_util.keystr(path)
            if not hasattr(leaf, "dtype") or not jax.numpy.issubdtype(
                leaf.dtype, jax.numpy.inexact
            ):
                raise TypeError(
                    f"value{where} must be an array of floating point or complex numbers, got"
                    f" {describe(leaf)}"
                )
        self.value: Any = jax.tree.map(jax.numpy.asarray, value)

    def __repr__(self) -> str:
        return f"Weights({self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if rpc.pickled_for() is None:
            return Weights, (self.value,)
        context = keeper().here.context
        value = self.value if context is None else record(context, self)
        return _itself, (value,)


def _itself(value: Any) -> Any:
    return value


class Leaf(Node):
    """Trained weights: their gradients stay in the context."""

    def __init__(self, context: Context, weights: Weights, outputs: int) -> None:
        super().__init__((), outputs)
        self._context = context
        self._weights = weights

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        """Add to the context's gradients."""
        del retain
        import jax

        leaves, tree = jax.tree.flatten(self._weights.value)
        pairs = zip(grads, leaves, strict=True)
        whole = [jax.numpy.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]
        self._context.add_gradient(self._weights, jax.tree.unflatten(tree, whole))
        return ()


def record(context: Context, weights: Weights) -> Any:
    """Return the weights as they are now, as recorded arrays."""
    import jax

    leaves, tree = jax.tree.flatten(weights.value)
    leaf = context.leaf(weights, lambda: Leaf(context, weights, len(leaves)))
    recorded = [Recorded(value, context, Edge(leaf, i)) for i, value in enumerate(leaves)]
    return jax.tree.unflatten(tree, recorded)
