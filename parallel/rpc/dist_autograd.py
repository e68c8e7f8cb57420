"""Gradients through remote calls, with the names of ``torch.distributed.autograd``."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from parallel.rpc._contexts import context_store
from parallel.rpc._engine import backward as _backward
from parallel.rpc._forward import forward, function, value_and_grad
from parallel.rpc._recorded import Recorded

__all__ = ["backward", "context", "forward", "function", "get_gradients", "value_and_grad"]


@contextmanager
def context() -> Generator[int]:
    """Return a context that records the thread's computations and calls; yields the context's id.

    The id is unique over all workers. Calls propagate the context to every worker that they reach,
    directly or indirectly, where computations by ``forward`` are recorded. At the end of the block,
    or after an exception, these workers drop it, but the block does not wait for them.

    Raises RuntimeError if RPC is not initialised, or in another context of the thread.
    """
    store = context_store()
    if store.thread.context is not None:
        raise RuntimeError(
            f"the thread is in the autograd context {store.thread.context.id} already; expected one"
            " context at a time"
        )
    context = store.begin()
    try:
        with store.within(context):
            yield context.id
    finally:
        store.release(context.id, frozenset())


def backward(context_id: int, roots: Sequence[Recorded], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of ``roots`` over all workers, and wait for them.

    Gradients of trained parameters are added to the context's, on the workers that own them. Sums
    of more than two gradients are in the order of arrival.

    Args:
        context_id: The context's id.
        roots: Recorded scalars on this worker, such as ``[loss]``.
        retain_graph: Allow another ``backward`` through the same values, but not through a
            module's forward pass, which allows only one.

    Raises TypeError for a root that is not a recorded value. Raises ValueError for a context that
    is not on this worker, and for a root that is not a scalar or is from another context. Raises
    RuntimeError for values whose graph an earlier pass has freed. Raises ``WorkerLostError``,
    ``RpcTimeoutError`` (the ``rpc_timeout`` holds for each call), and the errors of derivatives on
    all workers.
    """
    _backward(context_store(), context_id, list(roots), retain_graph)


def get_gradients(context_id: int) -> dict[Any, Any]:
    """Return the gradients of this worker's parameters in a context.

    Args:
        context_id: The context's id.

    Returns:
        The gradient of each ``Weights`` (a pytree like its ``value``) or ``parallel.nn.Parameter``.

    Raises ValueError for a context that is not on this worker.
    """
    found = context_store().find(context_id)
    with found.lock:
        return dict(found.gradients)
