"""``parallel.nn`` modules in autograd contexts, which store the data that forward saves.

Only one call at a time uses a module. It restores the module's other saved contexts, and its
parameters' gradients, afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from parallel._arrays import namespace
from parallel.nn._module import Module, SavedContexts
from parallel.rpc._contexts import Context, ContextStore
from parallel.rpc._graph import Edge, Node
from parallel.rpc._recorded import Recorded


def apply_module(
    store: ContextStore,
    context: Context | None,
    module: Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Compute ``module(*args, **kwargs)``; in a context, record it."""
    convert = _converter(module)
    name = type(module).__qualname__
    for key, value in kwargs.items():
        if isinstance(value, Recorded):
            raise TypeError(f"{key} is a recorded value; expected it as a positional argument")
    values = [convert(arg.value if isinstance(arg, Recorded) else arg) for arg in args]
    inputs = [arg.edge if isinstance(arg, Recorded) else None for arg in args]
    if context is None or not module.training:
        if any(edge is not None for edge in inputs):
            raise NotImplementedError(
                f"{name} got a recorded value in evaluation mode, in which forward saves nothing"
                " for backward; expected train(), or the value's .value"
            )
        with store.lock_of(module):
            return module(*values, **kwargs)
    with _apart(store, module):
        with ExitStack() as undo:
            undo.callback(module.discard_saved)
            output = module(*values, **kwargs)
            undo.pop_all()
        saved = module.take_saved()
    outputs = output if isinstance(output, tuple) else (output,)
    node = ModuleCall(store, context, module, saved, inputs, outputs)
    with context.lock:
        context.outstanding[node] = None
    recorded = [Recorded(array, context, Edge(node, i)) for i, array in enumerate(outputs)]
    return tuple(recorded) if isinstance(output, tuple) else recorded[0]


class ModuleCall(Node):
    """The forward pass of a module, which allows one backward."""

    def __init__(
        self,
        store: ContextStore,
        context: Context,
        module: Module,
        saved: SavedContexts,
        inputs: Sequence[Edge | None],
        outputs: Sequence[Any],
    ) -> None:
        super().__init__(inputs, len(outputs))
        self._store = store
        self._context = context
        self._module = module
        self._saved = saved
        self._likes = [(_converter(module), output) for output in outputs]

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        del retain
        name = type(self._module).__qualname__
        self.spent: str = (
            f"an earlier backward() has used a forward pass of {name}, whose saved data allows"
            " only one backward, even with retain_graph; expected another forward pass"
        )
        module = self._module
        converted = [_like(grad, *like) for grad, like in zip(grads, self._likes, strict=True)]
        parameters = list(module.parameters())
        with _apart(self._store, module):
            before = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            module.put_saved(self._take())
            try:
                result = module.backward(*converted)
                for parameter in parameters:
                    grad = parameter.grad
                    if grad is not None:
                        # The next gradient overwrites the parameter's own memory.
                        grad = grad if parameter.grad_home is None else grad.copy()
                        self._context.add_gradient(parameter, grad)
            finally:
                module.discard_saved()
                for parameter, grad in zip(parameters, before, strict=True):
                    parameter.grad = grad
        input_grads = list(result) if isinstance(result, tuple) else [result]
        # A loss, for example, returns a gradient for its first input only.
        input_grads += [None] * (len(self.inputs) - len(input_grads))
        return input_grads

    def discard(self, wait: bool) -> bool:
        """Free the data that forward saved, without a backward.

        Returns False if another call uses the module and ``wait`` is False.
        """
        lock = self._store.lock_of(self._module)
        if not lock.acquire(blocking=wait):
            return False
        try:
            for module, saved in self._take().items():
                for saved_context in saved:
                    module.forget(saved_context)
        finally:
            lock.release()
        return True

    def _take(self) -> SavedContexts:
        saved, self._saved = self._saved, {}
        self._context.outstanding.pop(self, None)
        return saved


@contextmanager
def _apart(store: ContextStore, module: Module) -> Generator[None]:
    """Lock the module and remove its saved contexts; restore these at the end."""
    with store.lock_of(module):
        others = module.take_saved()
        try:
            yield
        finally:
            module.put_saved(others)


def _converter(module: Module) -> Callable[[Any], Any]:
    """Return a function that converts an array to the module's array library."""
    first = next(module.parameters(), None)
    library = np if first is None else namespace(first.data)

    def convert(value: Any) -> Any:
        if not hasattr(value, "dtype") or isinstance(value, library.ndarray):
            return value
        return library.asarray(value)

    return convert


def _like(grad: Any, convert: Callable[[Any], Any], like: Any) -> Any:
    """Convert a gradient for the module's backward, to the dtype of the output ``like``."""
    if not hasattr(like, "dtype"):
        return 0.0 if grad is None else float(grad)
    if grad is None:
        return like * 0
    return convert(grad).astype(like.dtype, copy=False)
