"""The graph that a context records, and a backward pass's way through it.

The graph has values, the functions that made them, and messages between workers; each worker has
its part. The sender of a value keeps it under a number. On the receiving worker the value becomes
a ``ReceivedNode``, which names the sender and the number: the gradient goes back there. (Compare
the send and recv functions of ``torch.distributed.autograd``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

RECORDED = "_meshlib_recorded"
"""The attribute of functions that are recorded."""


class Node:
    """An operation that made values: it turns their gradients into gradients of its inputs.

    ``inputs`` are the edges along which those go; None drops one. ``outputs`` counts the values.
    """

    def __init__(self, inputs: Sequence[Edge | None] = (), outputs: int = 1) -> None:
        self.inputs: Sequence[Edge | None] = inputs
        self.outputs: int = outputs
        self.spent: str = ""
        """Why it cannot be gone through again, once that is so."""

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        """Return the gradients of the inputs, given those of its values (None: zeros).

        Without ``retain`` it is not called again, and keeps nothing.
        """
        raise NotImplementedError

    def discard(self, wait: bool) -> bool:
        """Give up what is kept for ``backward``; False if it is in use, unless ``wait``."""
        del wait
        return True


class Edge(NamedTuple):
    """A value: that of a node, by number."""

    node: Node
    slot: int


def filled(tree: Any, leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> Any:
    """Return the pytree of ``leaves``, with ``values`` in these places."""
    import jax

    leaves = list(leaves)
    for i, value in zip(places, values, strict=True):
        leaves[i] = value
    return jax.tree.unflatten(tree, leaves)


class ReceivedNode(Node):
    """A value that came from the worker ``origin``, which has sent it under ``number``.

    The engine sends its gradient there.
    """

    def __init__(self, origin: int, number: int) -> None:
        super().__init__()
        self.origin: int = origin
        self.number: int = number


class Sink(Node):
    """A value of a function that JAX differentiates: its gradient goes on there."""

    def __init__(self) -> None:
        super().__init__()
        self._grad: Any = None

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        del retain
        (self._grad,) = grads
        return ()

    def take(self) -> Any:
        """Return the gradient of the last pass, None if there was none."""
        grad, self._grad = self._grad, None
        return grad


PassKey = tuple[int, int]
"""The worker that began a pass, and its number for it."""


class BackwardPass:
    """One backward pass on one worker: which nodes are gone through, and what they wait for.

    Not thread-safe: the context's lock is held.

    First ``mark`` goes through the graph from the roots, on all workers that it reaches, and counts
    for each node the gradients that will come. Then each node runs when its last one is there. So
    what the roots do not depend on (a result that nobody used, a call that failed) is not waited
    for.
    """

    def __init__(self) -> None:
        self._expected: dict[Node, int] = {}
        self._grads: dict[Node, list[Any]] = {}

    def mark(self, nodes: Iterable[Node]) -> list[ReceivedNode]:
        """Expect a gradient of each of ``nodes``, and of what they were made from.

        Returns the messages that this reaches for the first time, which have come from elsewhere.
        Raises RuntimeError for a node that was gone through before, and kept nothing.
        """
        found: list[ReceivedNode] = []
        new = [node for node in nodes if self._expect(node)]
        while new:
            node = new.pop()
            if node.spent:
                raise RuntimeError(node.spent)
            if isinstance(node, ReceivedNode):
                found.append(node)
            new += [
                edge.node for edge in node.inputs if edge is not None and self._expect(edge.node)
            ]
        return found

    def _expect(self, node: Node) -> bool:
        before = self._expected.get(node, 0)
        self._expected[node] = before + 1
        return not before

    def arrive(self, edge: Edge, grad: Any, ready: deque[Node]) -> None:
        """Take a gradient, None for zeros; a node that has all of its own becomes ``ready``."""
        node = edge.node
        grads = self._grads.setdefault(node, [None] * node.outputs)
        if grad is not None:
            before = grads[edge.slot]
            grads[edge.slot] = grad if before is None else before + grad
        self._expected[node] -= 1
        if not self._expected[node]:
            ready.append(node)

    def take(self, node: Node) -> list[Any]:
        """Return the gradients of a node that is ready."""
        del self._expected[node]
        return self._grads.pop(node)

    @property
    def is_over(self) -> bool:
        """True if nothing is expected any more."""
        return not self._expected
