"""c10d's hooks of a process group's calls, and their events for PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import count
from typing import Any

_c10d: Any = import_module("torch._C._distributed_c10d")
_torch: Any = import_module("torch")

HAS_HOOKS: bool = hasattr(_c10d, "PreHookArgs")
"""True if PyTorch has hooks of calls (2.14 and later)."""

# The names of calls in hooks, unless they are the methods' names in capitals.
_HOOK_NAMES = {
    "recv_anysource": "RECV",
    "all_gather_single": "ALLGATHER_BASE",
    "all_gather_single_coalesced": "ALLGATHER_INTO_TENSOR_COALESCED",
    "reduce_scatter_single": "REDUCE_SCATTER_BASE",
    "reduce_scatter_single_coalesced": "REDUCE_SCATTER_TENSOR_COALESCED",
    "gather_single": "GATHER",
    "all_to_all_single": "ALLTOALL_BASE",
}
_SPELLED_OUT = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


class CallHooks:
    """The hooks of one group's calls, by id."""

    def __init__(self) -> None:
        self.before: dict[int, Callable[[Any], object]] = {}
        """Called with c10d's ``PreHookArgs``."""
        self.after: dict[int, Callable[[Any], object]] = {}
        """Called with c10d's ``PostHookArgs`` after a call is issued."""
        self._numbers = count()

    def is_empty(self) -> bool:
        """Return whether neither a hook nor a profiler observes the calls."""
        return not self.before and not self.after and not _torch.autograd._profiler_enabled()

    def make(
        self,
        name: str,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        opts: Any,
        call: Callable[[], Any],
    ) -> Any:
        """Call the hooks around ``call()``, c10d's method ``name``, and return its Work."""
        async_op = opts is None or opts.asyncOp
        number = next(self._numbers)
        if self.before:
            arguments = self._hook_arguments(_c10d.PreHookArgs(), name, number, async_op)
            arguments.input_tensors = [] if name.startswith("recv") else _flat(inputs)
            arguments.output_tensors = [] if name == "send" else _flat(outputs)
            arguments.root = getattr(opts, "rootRank", -1)
            for hook in list(self.before.values()):
                hook(arguments)
        work = _with_event(name, call)
        if self.after:
            arguments = self._hook_arguments(_c10d.PostHookArgs(), name, number, async_op)
            arguments.work = work
            for hook in list(self.after.values()):
                hook(arguments)
        return work

    def _hook_arguments(self, arguments: Any, name: str, number: int, async_op: bool) -> Any:
        wanted, known = _HOOK_NAMES.get(name, name.upper()), _c10d.HookOpName
        # PyTorch 2.14 distinguishes fewer calls than 2.15.
        names = (wanted, wanted.removesuffix("_BASE"), "UNKNOWN")
        arguments.name = next(getattr(known, each) for each in names if hasattr(known, each))
        arguments.op_id, arguments.async_op = number, async_op
        return arguments


def _with_event(name: str, call: Callable[[], Any]) -> Any:
    """Return ``call()``, with an event if PyTorch's profiler runs.

    The event of an asynchronous call covers only its issue. If it ended with the call's future, C++
    could end it after the profiler, and crash.
    """
    if not _torch.autograd._profiler_enabled():
        return call()
    kind, _, rest = name.partition("_")
    title = "_".join(filter(None, (_SPELLED_OUT.get(kind, kind), rest)))
    with _torch.autograd.profiler.record_function(f"meshlib:{title}"):
        return call()


def _flat(tensors: Any) -> list[Any]:
    """Return the tensors of nested lists as one list."""
    if isinstance(tensors, _torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]
