"""``RemoteModule``: a module that lives on another worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from meshlib import rpc
from parallel.nn._module import Module
from parallel.rpc._forward import forward


class RemoteModule:
    """A module on another worker; ``forward`` runs there, with its parameters.

        linear = RemoteModule("worker1", nn.Linear, (20, 30), {"rng": rng})
        y = linear(x)

    In an autograd context the output is a ``Recorded`` value, whose gradient goes back there. What
    the module's forward saves is kept with the context, so calls may overlap, as those of several
    microbatches do, and end in any order.

    Args:
        remote_device: the worker, by name, rank or ``WorkerInfo``. (``"worker1/cpu"``, torch's
            form, names the host's memory; there are no other devices.)
        module_cls: the class, importable there: a ``parallel.nn.Module``, or any other with a
            method ``forward``, which records by ``dist_autograd.forward`` itself
        args: its positional arguments
        kwargs: its keyword arguments

    Raises ValueError for a worker or device that there is not, TypeError for what cannot be called,
    what making the module raises.
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
                    f"remote_device is {remote_device!r}; expected a worker's name, or"
                    f" '{to}/cpu': modules on other devices are made by module_cls"
                )
        self._module: rpc.RRef[Any] = rpc.remote(to, module_cls, args, kwargs)
        self._module.creation().wait()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``forward`` of the arguments."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and wait for its output. Raises what it raises."""
        return rpc.rpc_sync(self._module.owner(), _forward, (self._module, args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> rpc.Future[Any]:
        """Call the module; return a future of its output."""
        return rpc.rpc_async(self._module.owner(), _forward, (self._module, args, kwargs))

    def get_module_rref(self) -> rpc.RRef[Any]:
        """Return a reference to the module."""
        return self._module

    def remote_parameters(self, recurse: bool = True) -> list[rpc.RRef[Any]]:
        """Return references to the module's parameters, for ``DistributedOptimizer``.

        ``recurse``: those of modules in it, too.
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
                f"a RemoteModule has no {name}(): its parameters live on another worker; expected"
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
