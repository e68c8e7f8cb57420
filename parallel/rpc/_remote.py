"""Remote modules, and optimizers on the workers that own parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from meshlib import rpc
from parallel._checks import check_transformation, describe
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter
from parallel.optim._optimizer import Optimizer
from parallel.rpc._contexts import ContextStore, context_store
from parallel.rpc._forward import Weights, forward


class RemoteModule:
    """A module on another worker, where ``forward`` runs and the parameters are.

        linear = RemoteModule("worker1", nn.Linear, (20, 30), {"rng": rng})
        y = linear(x)

    In an autograd context the output is a ``Recorded`` value, whose gradient is sent back to that
    worker. The context stores the data that forward saves. So calls may overlap, such as those of
    several microbatches, and complete in any order.

    Args:
        remote_device: The worker, by name, rank or ``WorkerInfo``. Torch's form ``"worker1/cpu"``
            means the host's memory; other devices are not supported.
        module_cls: The class, importable there: a ``parallel.nn.Module``, or another class whose
            ``forward`` method records by ``dist_autograd.forward`` itself.
        args: The positional arguments of the class.
        kwargs: The keyword arguments of the class.

    Raises ValueError for an unknown worker or device, TypeError if ``module_cls`` is not callable,
    and the errors of ``module_cls``.
    """

    def __init__(
        self,
        remote_device: rpc.Worker,
        module_cls: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        to = remote_device
        if isinstance(to, str) and "/" in to:
            to, _, device = to.partition("/")
            if device != "cpu":
                raise ValueError(
                    f"remote_device is {remote_device!r}; expected a worker's name or '{to}/cpu'."
                    " For another device, module_cls must make the module there"
                )
        self._module: rpc.RRef[Any] = rpc.remote(to, module_cls, args, kwargs)
        self._module.creation().wait()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``forward`` of the arguments."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module and wait for its output. Raises the module's errors."""
        return rpc.rpc_sync(self._module.owner(), _forward, (self._module, args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> rpc.Future[Any]:
        """Call the module; return a future of its output."""
        return rpc.rpc_async(self._module.owner(), _forward, (self._module, args, kwargs))

    def get_module_rref(self) -> rpc.RRef[Any]:
        """Return a reference to the module."""
        return self._module

    def remote_parameters(self, recurse: bool = True) -> list[rpc.RRef[Any]]:
        """Return references to the module's parameters, for ``DistributedOptimizer``.

        ``recurse`` includes the parameters of submodules.
        """
        return rpc.rpc_sync(self._module.owner(), _parameters, (self._module, recurse))

    def train(self, mode: bool = True) -> RemoteModule:
        """Set training mode (or evaluation mode) there; return self."""
        self._module.rpc_sync().train(mode)
        return self

    def eval(self) -> RemoteModule:
        """Set evaluation mode there; return self."""
        return self.train(False)

    def __getattr__(self, name: str) -> NoReturn:
        if name in _ELSEWHERE:
            raise AttributeError(
                f"a RemoteModule has no {name}(): its parameters are on another worker; expected"
                " remote_parameters(), or get_module_rref().rpc_sync()." + name
            )
        raise AttributeError(f"a RemoteModule has no attribute {name!r}")


_ELSEWHERE = frozenset(name for name in vars(Module) if not name.startswith("_"))


def _forward(rref: rpc.RRef[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module = rref.local_value()
    if isinstance(module, Module):
        return forward(module, *args, **kwargs)
    return module.forward(*args, **kwargs)


def _parameters(rref: rpc.RRef[Any], recurse: bool) -> list[rpc.RRef[Any]]:
    module = rref.local_value()
    if recurse or not isinstance(module, Module):
        return [rpc.RRef(parameter) for parameter in module.parameters()]
    own = [path for path, _ in module.named_parameters() if "." not in path]
    found = dict(module.named_parameters())
    return [rpc.RRef(found[path]) for path in own]


class DistributedOptimizer:
    """An optimizer of parameters on all their workers, from a context's gradients.

        optimizer = DistributedOptimizer(optax.adam, [w1, w2, *module.remote_parameters()], 1e-3)

    Each worker that owns parameters has a local optimizer with its state. Steps on one worker,
    including those of several clients, run one at a time.

    Args:
        optimizer_class: A class of ``parallel.optim`` for ``parallel.nn.Parameter``s; for
            ``Weights``, a function that returns an optax transformation, such as ``optax.adam``.
            Workers import it by name.
        params_rref: RRefs to ``Weights`` or ``parallel.nn.Parameter``s.
        args: Further arguments of ``optimizer_class``.
        kwargs: Keyword arguments of ``optimizer_class``.

    Raises TypeError for a value that is not a list of RRefs to parameters, and for an optax
    transformation in place of the function that makes it. Raises ValueError without parameters, and
    the errors of ``optimizer_class`` on the owners.
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
                "optimizer_class is an optax transformation, which cannot be sent; expected the"
                " function that makes it, with its arguments after params_rref, such as"
                " DistributedOptimizer(optax.adam, params, 1e-3)"
            )
        if not callable(optimizer_class):
            raise TypeError(f"optimizer_class must be callable, got {describe(optimizer_class)}")
        by_owner: dict[int, list[rpc.RRef[Any]]] = {}
        for i, param in enumerate(params_rref):
            if not isinstance(param, rpc.RRef):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"params_rref[{i}] must be an RRef, got {describe(param)}")
            by_owner.setdefault(param.owner().id, []).append(param)
        if not by_owner:
            raise ValueError("params_rref is empty; expected at least one parameter")
        with context_store().within(None):
            self._optimizers = [
                rpc.remote(owner, _LocalOptimizer, (optimizer_class, params, args, kwargs))
                for owner, params in by_owner.items()
            ]
            rpc.wait_all([optimizer.creation() for optimizer in self._optimizers])

    def step(self, context_id: int) -> None:
        """Update all parameters that have a gradient in the context, and wait for all owners.

        (For an optax transformation, a missing gradient is zero, unless all gradients of the owner
        are missing.)

        Raises ValueError for a context that is not on this worker, and the errors of owners.
        """
        store = context_store()
        with store.within(store.find(context_id)):
            steps = [optimizer.rpc_async().step(context_id) for optimizer in self._optimizers]
            rpc.wait_all(steps)


class _LocalOptimizer:
    """The optimizer of one worker's parameters."""

    def __init__(
        self, optimizer_class: Any, params_rref: list[rpc.RRef[Any]], args: Any, kwargs: Any
    ) -> None:
        params = [param.local_value() for param in params_rref]
        self._lock = threading.Lock()
        self._store: ContextStore = context_store()
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
        if own is of_weights:
            raise TypeError(
                f"optimizer_class is {optimizer_class.__qualname__}, but params_rref refers to"
                f" {type(params[0]).__name__}; expected a class of parallel.optim for Parameters,"
                " or a function that makes an optax transformation (optax.adam) for Weights"
            )
        if own:
            self._optimizer: Any = optimizer_class(params, *args, **kwargs)
        else:
            self._optimizer = _OptaxOptimizer(optimizer_class(*args, **kwargs), params)

    def step(self, context_id: int) -> None:
        context = self._store.find(context_id)
        with context.lock:
            grads = {param: context.gradients.get(param) for param in self._params}
        if all(grad is None for grad in grads.values()):
            return
        with self._lock:
            if isinstance(self._optimizer, _OptaxOptimizer):
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


class _OptaxOptimizer:
    """An optimizer of weights by an optax transformation."""

    def __init__(self, transformation: Any, weights: list[Weights]) -> None:
        import jax

        check_transformation(transformation)
        self._weights = weights
        self._state: Any = transformation.init([w.value for w in weights])

        def add(value: Any, update: Any) -> Any:
            return (value + update).astype(value.dtype)  # like optax.apply_updates

        def update(grads: Any, state: Any, values: Any) -> Any:
            updates, state = transformation.update(grads, state, values)
            return jax.tree.map(add, values, updates), state

        self._update = jax.jit(update)

    def step(self, grads: dict[Any, Any]) -> None:
        import jax

        values = [weights.value for weights in self._weights]
        filled_grads = [
            jax.tree.map(jax.numpy.zeros_like, w.value) if grads[w] is None else grads[w]
            for w in self._weights
        ]
        new_values, self._state = self._update(filled_grads, self._state, values)
        for weights, value in zip(self._weights, new_values, strict=True):
            weights.value = value
