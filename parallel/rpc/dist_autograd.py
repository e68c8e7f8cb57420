"""Gradients through remote calls: ``context``, ``forward``, ``backward``, ``get_gradients``.

Names as in ``torch.distributed.autograd``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from parallel.rpc._contexts import keeper
from parallel.rpc._engine import backward as _backward
from parallel.rpc._forward import forward, function, value_and_grad
from parallel.rpc._recorded import Recorded

__all__ = ["backward", "context", "forward", "function", "get_gradients", "value_and_grad"]


@contextmanager
def context() -> Generator[int]:
    """Record what the calling thread computes and calls; yield the context's id.

    The id is the only one of its kind on all workers. Calls take the context along, to every
    worker that they lead to, where what ``forward`` computes for them is recorded. At the end of
    the block, also by an exception, all of them forget it (the message is not waited for).

    Raises RuntimeError where RPC is not initialised, or in another context of the thread.
    """
    here = keeper()
    if here.here.context is not None:
        raise RuntimeError(
            f"the thread is in the autograd context {here.here.context.id} already; expected one"
            " context at a time"
        )
    made = here.begin()
    try:
        with here.within(made):
            yield made.id
    finally:
        here.release(made.id, frozenset())


def backward(context_id: int, roots: Sequence[Recorded], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of ``roots``, through all workers.

    Gradients of trained parameters are added to the context's, on the workers that own them.
    Returns when all workers are done. Sums of more than two gradients are in the order of arrival.

    Args:
        context_id: The context's id.
        roots: Recorded scalars on this worker, such as ``[loss]``.
        retain_graph: Allow another ``backward`` through the same values. (Not through a module's
            forward pass: its backward works once.)

    Raises TypeError for a root that is not a recorded value. Raises ValueError for a context that
    is not on this worker, and for a root that is not a scalar or belongs to another context.
    Raises RuntimeError for values that an earlier pass went through. Raises ``WorkerLostError``,
    ``RpcTimeoutError`` (each worker's part has its callers' ``rpc_timeout``), and the errors of
    derivatives on all workers.
    """
    _backward(keeper(), context_id, list(roots), retain_graph)


def get_gradients(context_id: int) -> dict[Any, Any]:
    """Return the gradients of this worker's parameters in a context.

    Args:
        context_id: the context's id

    Returns:
        A gradient by ``Weights`` (a pytree as its ``value``) or ``parallel.nn.Parameter``.

    Raises ValueError for a context that is not on this worker.
    """
    found = keeper().find(context_id)
    with found.lock:
        return dict(found.gradients)
