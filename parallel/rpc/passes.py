"""One backward pass on one worker: which nodes are gone through, and what they wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from parallel.rpc.graph import Edge, Node, Received

PassKey = tuple[int, int]
"""The worker that began a pass, and its number for it."""


class Pass:
    """Not thread-safe: the context's lock is held.

    First ``mark`` goes through the graph from the roots, on all workers that it reaches, and counts
    for each node the gradients that will come. Then each node runs when its last one is there. So
    what the roots do not depend on (a result that nobody used, a call that failed) is not waited
    for.
    """

    def __init__(self) -> None:
        self._expected: dict[Node, int] = {}
        self._grads: dict[Node, list[Any]] = {}

    def mark(self, nodes: Iterable[Node]) -> list[Received]:
        """Expect a gradient of each of ``nodes``, and of what they were made from.

        Returns the messages that this reaches for the first time, which have come from elsewhere.
        Raises RuntimeError for a node that was gone through before, and kept nothing.
        """
        found: list[Received] = []
        new = [node for node in nodes if self._expect(node)]
        while new:
            node = new.pop()
            node.check()
            if isinstance(node, Received):
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
        """Whether nothing is expected any more."""
        return not self._expected
