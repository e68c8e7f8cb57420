"""Backward passes over the workers.

A pass traverses the graph twice. *Mark* goes from the roots back through each worker's part, calls
the workers that sent values, and so determines the number of gradients of each node. *Propagate*
runs each node, on its worker, after its gradients have arrived, and sends the gradients of received
values back to their senders. A call returns after all calls that it has made, so the pass is
complete when its first calls return. (``torch.distributed.autograd`` calls this SMART mode. Its
FAST mode does not mark: it assumes that each sent value gets a gradient.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from meshlib import rpc
from parallel._checks import describe
from parallel.rpc._contexts import Context, ContextStore, context_store
from parallel.rpc._graph import BackwardPass, Edge, Node, PassKey, ReceivedNode
from parallel.rpc._recorded import Recorded

Arrival = tuple[Edge, Any]


def backward(store: ContextStore, context_id: int, roots: Sequence[object], retain: bool) -> None:
    """See ``dist_autograd.backward``."""
    context = store.find(context_id)
    arrivals: list[Arrival] = []
    for i, root in enumerate(roots):
        if not isinstance(root, Recorded):
            raise TypeError(
                f"roots[{i}] must be a recorded value, which dist_autograd.forward() or a recorded"
                f" call returns, got {describe(root)}"
            )
        if root.context is not context:
            raise ValueError(
                f"roots[{i}] was recorded in the context {root.context.id}; expected {context_id}"
            )
        if root.shape not in ((), (1,)):
            raise ValueError(f"roots[{i}] must be a scalar, got shape {list(root.shape)}")
        arrivals.append((root.edge, _one_like(root.value)))
    run_pass(store, context, arrivals, retain)


def run_pass(store: ContextStore, context: Context, roots: list[Arrival], retain: bool) -> None:
    """Propagate gradients back from ``roots``, (value, gradient); wait for all workers."""
    key = store.next_pass()
    with store.within(context):
        rpc.wait_all(_mark_from(context, key, [edge.node for edge, _ in roots]))
        rpc.wait_all(_propagate_from(context, key, roots, retain))


def _mark_from(context: Context, key: PassKey, nodes: Iterable[Node]) -> list[rpc.Future[Any]]:
    with context.lock:
        context_pass = context.passes.setdefault(key, BackwardPass())
        reached = context_pass.mark(nodes)
    by_origin: dict[int, list[int]] = {}
    for node in reached:
        by_origin.setdefault(node.origin, []).append(node.number)
    return [
        rpc.rpc_async(origin, _mark, (context.id, key, numbers))
        for origin, numbers in by_origin.items()
    ]


@rpc.functions.async_execution
def _mark(context_id: int, key: PassKey, numbers: list[int]) -> rpc.Future[None]:
    """Mark, on the worker that sent values, the nodes from which they were computed."""
    store = context_store()
    context = store.find(context_id)
    with store.within(context):
        return _all(_mark_from(context, key, [context.sent(number).node for number in numbers]))


def _propagate_from(
    context: Context, key: PassKey, arrivals: Iterable[Arrival], retain: bool
) -> list[rpc.Future[Any]]:
    """Add gradients to nodes and run the nodes that become ready. Return the remote calls made."""
    ready: deque[Node] = deque()
    calls: list[rpc.Future[Any]] = []
    context_pass = context.pass_of(key)

    def take(arrivals: Iterable[Arrival]) -> None:
        with context.lock:
            for edge, grad in arrivals:
                context_pass.arrive(edge, grad, ready)

    take(arrivals)
    while ready:
        # Messages to other workers are first, to overlap their computation with this worker's.
        by_origin: dict[int, list[tuple[int, Any]]] = {}
        for node in [node for node in ready if isinstance(node, ReceivedNode)]:
            ready.remove(node)
            (grad,) = _take(context, context_pass, node)
            by_origin.setdefault(node.origin, []).append((node.number, grad))
        for origin, grads in by_origin.items():
            sent = (context.id, key, grads, retain)
            calls.append(rpc.rpc_async(origin, _propagate, sent))
        if ready:
            node = ready.popleft()
            grads = node.backward(_take(context, context_pass, node), retain)
            take((edge, grad) for edge, grad in zip(node.inputs, grads, strict=True) if edge)
    with context.lock:
        if context_pass.is_over:
            context.passes.pop(key, None)
    return calls


def _take(context: Context, context_pass: BackwardPass, node: Node) -> list[Any]:
    with context.lock:
        return context_pass.take(node)


@rpc.functions.async_execution
def _propagate(
    context_id: int, key: PassKey, grads: list[tuple[int, Any]], retain: bool
) -> rpc.Future[None]:
    """Propagate, on the worker that sent values, their gradients."""
    store = context_store()
    context = store.find(context_id)
    arrivals = [(context.sent(number), grad) for number, grad in grads]
    with store.within(context):
        return _all(_propagate_from(context, key, arrivals, retain))


def _all(calls: Sequence[rpc.Future[Any]]) -> rpc.Future[None]:
    """Return a future that completes with the last of ``calls``, or fails with the first error."""
    result: rpc.Future[None] = rpc.Future()
    pending, lock = len(calls), threading.Lock()

    def on_done(done: rpc.Future[Any]) -> None:
        nonlocal pending
        error = done.exception()
        with lock:
            pending -= 1
            complete = not pending
        with suppress(RuntimeError):  # the result has an earlier error
            if error is not None:
                result.set_exception(error)
            elif complete:
                result.set_result(None)

    if not calls:
        result.set_result(None)
    for call in calls:
        call.add_done_callback(on_done)
    return result


def _one_like(value: Any) -> Any:
    return 1.0 if isinstance(value, float) else value * 0 + 1
