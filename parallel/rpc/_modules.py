"""``parallel.nn`` modules in autograd contexts: the context keeps the arrays that forward saves.

One call at a time uses a module. Afterwards its other saved arrays, and its parameters' gradients,
are as they were before.
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
    here: ContextStore,
    context: Context | None,
    module: Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Compute ``module(*args, **kwargs)``; in a context, record it."""
    convert = _converter(module)
    name = type(module).__qualname__
    for key, it in kwargs.items():
        if isinstance(it, Recorded):
            raise TypeError(f"{key} is a recorded value; expected it as a positional argument")
    values = [convert(it.value) if isinstance(it, Recorded) else convert(it) for it in args]
    inputs = [it.edge if isinstance(it, Recorded) else None for it in args]
    if context is None or not module.training:
        if any(edge is not None for edge in inputs):
            raise NotImplementedError(
                f"{name} is in evaluation mode, where forward saves nothing for backward, and got"
                " a recorded value; expected train(), or the value's .value"
            )
        with here.lock_of(module):
            return module(*values, **kwargs)
    with _apart(here, module):
        with ExitStack() as undo:
            undo.callback(module.discard_saved)
            output = module(*values, **kwargs)
            undo.pop_all()
        saved = module.take_saved()
    outputs = output if isinstance(output, tuple) else (output,)
    node = ModuleCall(here, context, module, saved, inputs, outputs)
    with context.lock:
        context.outstanding[node] = None
    recorded = [Recorded(it, context, Edge(node, i)) for i, it in enumerate(outputs)]
    return tuple(recorded) if isinstance(output, tuple) else recorded[0]


class ModuleCall(Node):
    """A module's forward pass, whose backward it allows once."""

    def __init__(
        self,
        here: ContextStore,
        context: Context,
        module: Module,
        saved: SavedContexts,
        inputs: Sequence[Edge | None],
        outputs: Sequence[Any],
    ) -> None:
        super().__init__(inputs, len(outputs))
        self._here = here
        self._context = context
        self._module = module
        self._saved = saved
        self._likes = [(_converter(module), it) for it in outputs]

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        del retain
        name = type(self._module).__qualname__
        self.spent: str = (
            f"backward() has gone through a forward pass of {name} before: a module's backward"
            " consumes what forward has saved, so retain_graph has no effect on it; expected"
            " another forward pass"
        )
        module = self._module
        given = [_like(grad, *like) for grad, like in zip(grads, self._likes, strict=True)]
        parameters = list(module.parameters())
        with _apart(self._here, module):
            before = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            module.put_saved(self._take())
            try:
                result = module.backward(*given)
                for parameter in parameters:
                    grad = parameter.grad
                    if grad is not None:
                        # Memory that is the parameter's own will be written again.
                        grad = grad if parameter.grad_home is None else grad.copy()
                        self._context.add_gradient(parameter, grad)
            finally:
                module.discard_saved()
                for parameter, grad in zip(parameters, before, strict=True):
                    parameter.grad = grad
        found = list(result) if isinstance(result, tuple) else [result]
        if len(found) < len(self.inputs):  # such as a loss's: of its first input
            found += [None] * (len(self.inputs) - len(found))
        return found

    def discard(self, wait: bool) -> bool:
        """Forget what forward has saved: there will be no backward.

        False if that would have to wait for a user of the module, and must not.
        """
        lock = self._here.lock_of(self._module)
        if not lock.acquire(blocking=wait):
            return False
        try:
            for module, saved in self._take().items():
                for one in saved:
                    module.forget(one)
        finally:
            lock.release()
        return True

    def _take(self) -> SavedContexts:
        saved, self._saved = self._saved, {}
        self._context.outstanding.pop(self, None)
        return saved


@contextmanager
def _apart(here: ContextStore, module: Module) -> Generator[None]:
    """Have the module alone, with nothing saved; put back what was."""
    with here.lock_of(module):
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
    """Return a gradient as the module takes it, of an output ``like``."""
    if not hasattr(like, "dtype"):
        return 0.0 if grad is None else float(grad)
    if grad is None:
        return like * 0
    return convert(grad).astype(like.dtype, copy=False)
