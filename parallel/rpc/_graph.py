"""The graph that a context records, and backward passes through it.

The graph has values, the functions that computed them, and messages between workers; each worker
has a part of it. The sender of a value stores its edge by number. On the receiving worker the value
becomes a ``ReceivedNode`` with the sender and the number, to which the gradient is sent back.
(Compare the send and recv functions of ``torch.distributed.autograd``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

RECORDED = "_meshlib_recorded"
"""The attribute of functions that are recorded."""


class Node:
    """An operation, which maps the gradients of its output values to gradients of its inputs.

    ``inputs`` are the edges that receive these gradients; None drops a gradient. ``outputs`` is the
    number of output values.
    """

    def __init__(self, inputs: Sequence[Edge | None] = (), outputs: int = 1) -> None:
        self.inputs: Sequence[Edge | None] = inputs
        self.outputs: int = outputs
        self.spent: str = ""
        """The error of another backward, or "" if another one is possible."""

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        """Return the gradients of the inputs for those of the outputs (None: zeros).

        Without ``retain`` the node may free its data, because this is the only call.
        """
        raise NotImplementedError

    def discard(self, wait: bool) -> bool:
        """Free the data for ``backward``; return False if it is in use and ``wait`` is False."""
        del wait
        return True


class Edge(NamedTuple):
    """A value: output number ``slot`` of a node."""

    node: Node
    slot: int


def filled(tree: Any, leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> Any:
    """Return the pytree of ``leaves`` with ``values`` at the given ``places``."""
    import jax

    leaves = list(leaves)
    for i, value in zip(places, values, strict=True):
        leaves[i] = value
    return jax.tree.unflatten(tree, leaves)


class ReceivedNode(Node):
    """A value received from the worker ``origin``, which stores its edge by ``number``.

    The engine sends the gradient back to this worker.
    """

    def __init__(self, origin: int, number: int) -> None:
        super().__init__()
        self.origin: int = origin
        self.number: int = number


class Sink(Node):
    """A value of a function that JAX differentiates; stores the gradient for JAX."""

    def __init__(self) -> None:
        super().__init__()
        self._grad: Any = None

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        del retain
        (self._grad,) = grads
        return ()

    def take(self) -> Any:
        """Return and clear the gradient of the last pass, if any."""
        grad, self._grad = self._grad, None
        return grad


PassKey = tuple[int, int]
"""The worker that began a pass, and the pass's number on this worker."""


class BackwardPass:
    """One worker's part of a backward pass: the gradients of nodes, and the number expected.

    Not thread-safe: callers must hold the context's lock.

    First, ``mark`` traverses the graph from the roots, on all workers, and counts the gradients
    that each node will get. Then each node runs after its last gradient. So the pass does not wait
    for values on which the roots do not depend, such as results of failed calls.
    """

    def __init__(self) -> None:
        self._expected: dict[Node, int] = {}
        self._grads: dict[Node, list[Any]] = {}

    def mark(self, nodes: Iterable[Node]) -> list[ReceivedNode]:
        """Expect a gradient for each of ``nodes``, and for the nodes on which these depend.

        Returns the received values that it reaches for the first time. Raises RuntimeError for a
        node whose data an earlier pass has freed.
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
        """Add a gradient (None: zeros); append the node to ``ready`` after its last gradient."""
        node = edge.node
        grads = self._grads.setdefault(node, [None] * node.outputs)
        if grad is not None:
            before = grads[edge.slot]
            grads[edge.slot] = grad if before is None else before + grad
        self._expected[node] -= 1
        if not self._expected[node]:
            ready.append(node)

    def take(self, node: Node) -> list[Any]:
        """Remove and return the gradients of a ready node."""
        del self._expected[node]
        return self._grads.pop(node)

    @property
    def is_over(self) -> bool:
        """True if all expected gradients have arrived."""
        return not self._expected
