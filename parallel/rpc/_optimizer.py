"""``DistributedOptimizer``: an optimizer on each worker that has parameters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from meshlib import rpc
from parallel._checks import describe
from parallel.nn._parameter import Parameter
from parallel.optim._optax import OptaxOptimizer
from parallel.optim._optimizer import Optimizer
from parallel.rpc._contexts import Keeper, keeper
from parallel.rpc._forward import Weights


class DistributedOptimizer:
    """Updates parameters on all the workers where they live, from a context's gradients.

        optimizer = DistributedOptimizer(optax.adam, [w1, w2, *module.remote_parameters()], 1e-3)

    On each owner of parameters one optimizer is made, and keeps its state there. Steps on one owner
    are made one after the other, also those of several clients.

    Args:
        optimizer_class: a class of ``parallel.optim`` (for ``parallel.nn.Parameter``s), or what
            makes an optax transformation, such as ``optax.adam``. It travels by its name
        params_rref: RRefs to ``Weights`` or ``parallel.nn.Parameter``s
        args: further arguments of ``optimizer_class``
        kwargs: its keyword arguments

    Raises TypeError for what is no list of RRefs to parameters, and for an optax transformation in
    place of the function that makes it; ValueError for no parameters; what making an optimizer
    raises on its owner.
    """

    def __init__(
        self,
        optimizer_class: Any,
        params_rref: Sequence[rpc.RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if hasattr(optimizer_class, "init") and hasattr(optimizer_class, "update"):
            raise TypeError(
                "optimizer_class is an optax transformation, which cannot travel: it is made of"
                " local functions; expected what makes it, and its arguments after params_rref, as"
                " in DistributedOptimizer(optax.adam, params, 1e-3)"
            )
        if not callable(optimizer_class):
            raise TypeError(f"optimizer_class must be callable, got {describe(optimizer_class)}")
        by_owner: dict[int, list[rpc.RRef[Any]]] = {}
        for i, param in enumerate(params_rref):
            if not isinstance(param, rpc.RRef):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"params_rref[{i}] must be an RRef, got {describe(param)}")
            by_owner.setdefault(param.owner().id, []).append(param)
        if not by_owner:
            raise ValueError("params_rref is empty; an optimizer needs at least one parameter")
        with keeper().within(None):
            self._optimizers = [
                rpc.remote(owner, _OwnersOptimizer, (optimizer_class, params, args, kwargs))
                for owner, params in by_owner.items()
            ]
            rpc.wait_all([one.creation() for one in self._optimizers])

    def step(self, context_id: int) -> None:
        """Update all parameters that have a gradient in the context.

        Returns when all owners have. (An optax transformation takes a parameter without one as one
        with zeros, unless none of the owner's has.)

        Raises ValueError for a context that is not on this worker, and what an owner raises.
        """
        here = keeper()
        with here.within(here.find(context_id)):
            steps = [one.rpc_async().step(context_id) for one in self._optimizers]
            rpc.wait_all(steps)


class _OwnersOptimizer:
    """On an owner: the optimizer of its parameters."""

    def __init__(
        self, optimizer_class: Any, params_rref: list[rpc.RRef[Any]], args: Any, kwargs: Any
    ) -> None:
        params = [param.local_value() for param in params_rref]
        self._lock = threading.Lock()
        self._here: Keeper = keeper()
        self._params = params
        kinds = {type(param) for param in params}
        known = all(isinstance(param, Weights | Parameter) for param in params)
        if not known or len(kinds) > 1:
            raise TypeError(
                "params_rref must refer to Weights, or to parallel.nn.Parameters, on one worker;"
                f" got objects of {sorted(kind.__name__ for kind in kinds)}"
            )
        own = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
        of_weights = isinstance(params[0], Weights)
        if own and of_weights:
            raise TypeError(
                f"{optimizer_class.__name__} updates parallel.nn.Parameters, and params_rref refers"
                " to Weights; expected an optax transformation, such as optax.adam"
            )
        if own:
            self._optimizer: Any = optimizer_class(params, *args, **kwargs)
        elif of_weights:
            self._optimizer = _OfWeights(optimizer_class(*args, **kwargs), params)
        else:
            self._optimizer = OptaxOptimizer(params, optimizer_class(*args, **kwargs))

    def step(self, context_id: int) -> None:
        context = self._here.find(context_id)
        with context.lock:
            grads = {param: context.gradients.get(param) for param in self._params}
        if all(grad is None for grad in grads.values()):
            return
        with self._lock:
            if isinstance(self._optimizer, _OfWeights):
                self._optimizer.step(grads)
                return
            before = [param.grad for param in self._params]
            for param, grad in grads.items():
                param.grad = grad
            try:
                self._optimizer.step()
            finally:
                for param, grad in zip(self._params, before, strict=True):
                    param.grad = grad


class _OfWeights:
    """An optax transformation of weights."""

    def __init__(self, transformation: Any, weights: list[Weights]) -> None:
        import jax

        from parallel.optim._optax import check_transformation

        check_transformation(transformation)
        self._weights = weights
        self._state: Any = transformation.init([one.value for one in weights])

        def added(value: Any, update: Any) -> Any:
            return (value + update).astype(value.dtype)  # as optax.apply_updates does

        def update(grads: Any, state: Any, values: Any) -> Any:
            updates, state = transformation.update(grads, state, values)
            return jax.tree.map(added, values, updates), state

        self._update = jax.jit(update)

    def step(self, grads: dict[Any, Any]) -> None:
        import jax

        values = [one.value for one in self._weights]
        given = [
            jax.tree.map(jax.numpy.zeros_like, one.value) if grads[one] is None else grads[one]
            for one in self._weights
        ]
        new, self._state = self._update(given, self._state, values)
        for one, value in zip(self._weights, new, strict=True):
            one.value = value
