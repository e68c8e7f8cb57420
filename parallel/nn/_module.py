"""Modules: trees of parameters with a forward and a hand-written backward.

There is no automatic differentiation. A module's ``forward`` saves the data for its ``backward``.
``backward`` accepts the gradient of the output, accumulates the gradients of the module's own
parameters, and returns the gradient of the input. The caller (or ``Sequential``) applies the chain
rule.

**Saved contexts.** In training mode, ``forward`` pushes a context on the module's own stack, and
``backward`` pops the last one. So several forward passes may be outstanding, and their backward
passes run in reverse, as the chain rule requires for a module that is used twice. For another
order, as in a pipeline of microbatches, ``take_saved`` removes contexts and ``put_saved`` restores
them. ``backward`` without a matching ``forward`` is an error. In evaluation mode nothing is saved.

**Backward in two halves.** A pipeline computes the gradient of a stage's input first, and those of
its parameters later, when the rank would be idle. A layer passes the computation of its parameters'
gradients to ``defer``, which runs it at once or, inside ``deferring``, postpones it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from parallel._arrays import Array
from parallel._checks import check_array, check_state_dict
from parallel.nn._parameter import Buffer, Parameter, from_global

_Kind = TypeVar("_Kind", Parameter, Buffer)

SavedContexts = dict["Module", list[Any]]
"""The result of ``take_saved``: an opaque value for ``put_saved``."""

Work = Callable[[], object]
"""An argument of ``defer``: a function that computes gradients of parameters."""


class Module:
    """The base of all layers and models.

    Parameters, buffers and child modules are attributes of the instance, registered in the order of
    their first assignment. A subclass calls ``super().__init__()`` first, and implements
    ``forward`` and ``backward``, which save and restore data with ``save_for_backward`` and
    ``saved``.
    """

    _deferred: list[Work] | None = None

    def __init__(self) -> None:
        self.training = True
        self._saved: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the given inputs. Subclasses document their inputs and errors."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define forward")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input's gradient for the output's; accumulate the parameters' gradients."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define backward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``forward`` of the arguments."""
        return self.forward(*args, **kwargs)

    # Saved contexts

    def save_for_backward(self, context: Any) -> None:
        """In training mode, push ``context`` and announce one use of each own parameter."""
        if self.training:
            self._saved.append(context)
            for parameter in self._own(Parameter):
                parameter.expect_grad()

    def saved(self) -> Any:
        """Pop the context of the last outstanding forward; raise RuntimeError if there is none."""
        if not self._saved:
            why = "" if self.training else " (in evaluation mode forward saves nothing)"
            raise RuntimeError(
                f"{type(self).__qualname__}.backward was called without a matching forward{why}; "
                "each forward in training mode allows one backward"
            )
        return self._saved.pop()

    @property
    def outstanding(self) -> int:
        """The number of this module's own forward passes that wait for their backward."""
        return len(self._saved)

    def take_saved(self) -> SavedContexts:
        """Remove and return the contexts of all outstanding forward passes of the tree.

        Parameters still count their uses: gradients remain incomplete until the contexts are
        restored with ``put_saved`` and used.
        """
        taken: SavedContexts = {}
        for module in self.modules():
            if module._saved:
                taken[module], module._saved = module._saved, []
        return taken

    def put_saved(self, contexts: SavedContexts) -> None:
        """Push contexts of ``take_saved`` back on the modules' stacks."""
        for module, saved in contexts.items():
            module._saved.extend(saved)

    def discard_saved(self) -> None:
        """Discard all outstanding forward passes of the tree; their backward cannot run."""
        for module, saved in self.take_saved().items():
            for context in saved:
                module.forget(context)

    def forget(self, context: Any) -> None:
        """Withdraw the uses of own parameters that forward announced when it saved ``context``.

        A module that announces other uses must override this.
        """
        del context
        for parameter in self._own(Parameter):
            parameter.forget_uses()

    # Backward in two halves

    def defer(self, work: Work) -> None:
        """Call ``work``, which computes own parameters' gradients, now or after ``deferring``.

        For a layer's ``backward``. ``work`` must hold its data, because it has no saved context.
        """
        if self._deferred is None:
            work()
        else:
            self._deferred.append(work)

    @contextmanager
    def deferring(self) -> Generator[list[Work]]:
        """Return a context in which backward defers the computation of parameters' gradients.

        Yields the list of deferred works. The caller must call each of them once, in order.
        Parameters of layers that do not ``defer`` get their gradients at once.
        """
        deferred: list[Work] = []
        modules = [(module, module._deferred) for module in self.modules()]
        for module, _ in modules:
            module._deferred = deferred
        try:
            yield deferred
        finally:
            for module, before in modules:
                module._deferred = before

    @contextmanager
    def deferred_by(self, around: Callable[[Work], object]) -> Generator[None]:
        """Return a context whose deferred works are combined in one call of ``around(work)``.

        For a module whose backward sets up a state that submodules also need for their parameters'
        gradients.
        """
        deferred = self._deferred
        begin = 0 if deferred is None else len(deferred)
        yield
        if deferred is not None:
            deferred[begin:] = [partial(around, partial(do_all, deferred[begin:]))]

    # The tree

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (attribute name, module) for the direct children."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (path, module) for this module and all submodules, each module once."""
        seen: set[Module] = set()

        def walk(path: str, module: Module) -> Iterator[tuple[str, Module]]:
            if module in seen:
                return
            seen.add(module)
            yield path, module
            for name, child in module.named_children():
                yield from walk(f"{path}.{name}" if path else name, child)

        return walk(prefix, self)

    def modules(self) -> Iterator[Module]:
        """Yield this module and all submodules, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield (path, parameter) in the order of registration.

        A parameter that modules share is yielded once, with its first path, unless
        ``remove_duplicate`` is False.
        """
        return self._named(Parameter, prefix, remove_duplicate)

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters, each once, in the order of registration."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Buffer]]:
        """Yield (path, buffer) in the order of registration."""
        return self._named(Buffer, prefix, remove_duplicate)

    def buffers(self) -> Iterator[Buffer]:
        """Yield the buffers, each once, in the order of registration."""
        return (buffer for _, buffer in self.named_buffers())

    def _own(self, kind: type[_Kind]) -> Iterator[_Kind]:
        return (value for value in vars(self).values() if isinstance(value, kind))

    def _named(
        self, kind: type[_Kind], prefix: str, remove_duplicate: bool
    ) -> Iterator[tuple[str, _Kind]]:
        seen: set[int] = set()
        for path, module in self.named_modules(prefix):
            for name, value in vars(module).items():
                if not isinstance(value, kind) or (remove_duplicate and id(value) in seen):
                    continue
                seen.add(id(value))
                yield (f"{path}.{name}" if path else name), value

    # State and modes

    def state_dict(self) -> dict[str, Array]:
        """Return ``{path: array}`` for parameters and persistent buffers, without copies.

        Parameters that are split over ranks (``fully_shard``, ``parallelize`` over a mesh) are
        DArrays.
        """
        state = {path: p.value for path, p in self.named_parameters(remove_duplicate=False)}
        for path, buffer in self.named_buffers(remove_duplicate=False):
            if buffer.persistent:
                state[path] = buffer.data
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy ``state`` into parameters and buffers, in place.

        Arrays are whole, or DArrays in any sharding; with DArrays, all their ranks must call.

        Raises KeyError when paths are missing or unexpected, and ValueError for another shape; both
        name the paths. Raises TypeError for a value that is not a mapping or an array. After an
        error, nothing is changed.
        """
        check_state_dict(state)
        own = self.state_dict()
        missing = [path for path in own if path not in state]
        unexpected = [path for path in state if path not in own]
        if missing or unexpected:
            raise KeyError(f"state does not fit: missing {missing}, unexpected {unexpected}")
        for path, array in own.items():
            check_array(state[path], f"state[{path!r}]")
            if tuple(state[path].shape) != tuple(array.shape):
                raise ValueError(
                    f"state[{path!r}] must have shape {list(array.shape)}, "
                    f"got {list(state[path].shape)}"
                )
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for path, array in own.items():
            parameter = parameters.get(path)
            if parameter is None:
                array[...] = state[path]
            else:
                parameter.data[...] = from_global(parameter, state[path], copy=False)

    def map_arrays(self, function: Callable[[Array], Array]) -> Self:
        """Replace the array of each parameter and buffer by ``function(array)``; return self.

        ``map_arrays(cupy.asarray)`` moves a model to a GPU, ``map_arrays(lambda a:
        a.astype("float64"))`` changes its dtype. Gradients are dropped.
        """
        for parameter in self.parameters():
            parameter.data = function(parameter.data)
            parameter.set_grad_home(None)
            parameter.grad = None
        for buffer in self.buffers():
            buffer.data = function(buffer.data)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set training mode (or evaluation mode) for the whole tree; return self."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Set evaluation mode for the whole tree; return self."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze (False) or unfreeze all parameters of the tree; return self."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the tree, or fill them with zeros in place."""
        for parameter in self.parameters():
            parameter.zero_grad(set_to_none)


def do_all(works: Sequence[Work]) -> None:
    """Call the deferred works in order."""
    for work in works:
        work()


def others_wait(count: int) -> RuntimeError:
    """Return the error for a backward with ``count`` other outstanding forward passes."""
    return RuntimeError(
        f"{count} other forward passes still wait for their backward, so this one cannot complete "
        "the gradients; run all but the last inside no_sync(), or call discard_saved() if a "
        "forward was not meant for training"
    )
