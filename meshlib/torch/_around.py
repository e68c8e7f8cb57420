"""Around a call of a process group: an event for PyTorch's profiler, and c10d's hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import count
from typing import Any

_c10d: Any = import_module("torch._C._distributed_c10d")
_torch: Any = import_module("torch")

HAS_HOOKS: bool = hasattr(_c10d, "PreHookArgs")
"""True if PyTorch has hooks of calls, as from 2.14 on."""

# The names of calls in hooks, where those are not the methods' in capitals.
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


class Around:
    """The hooks of one group by their ids, and whether anything surrounds its calls."""

    def __init__(self) -> None:
        self.before: dict[int, Callable[[Any], object]] = {}
        """Called with c10d's ``PreHookArgs``."""
        self.after: dict[int, Callable[[Any], object]] = {}
        """Called with c10d's ``PostHookArgs``, when the call was issued."""
        self._numbers = count()

    def is_empty(self) -> bool:
        """True if no profiler or hook observes the calls."""
        return not self.before and not self.after and not _torch.autograd._profiler_enabled()

    def make(
        self,
        name: str,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        opts: Any,
        call: Callable[[], Any],
    ) -> Any:
        """Return the Work of ``call()``, which is c10d's method ``name`` on these tensors."""
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
        # PyTorch 2.14 tells apart fewer calls than 2.15.
        names = (wanted, wanted.removesuffix("_BASE"), "UNKNOWN")
        arguments.name = next(getattr(known, each) for each in names if hasattr(known, each))
        arguments.op_id, arguments.async_op = number, async_op
        return arguments


def _with_event(name: str, call: Callable[[], Any]) -> Any:
    """Return ``call()``, with an event if PyTorch's profiler runs.

    The event of an asynchronous call is its issue: one that ended with a future would be ended in
    C++ after the profiler, and crash.
    """
    if not _torch.autograd._profiler_enabled():
        return call()
    kind, _, rest = name.partition("_")
    title = "_".join(filter(None, (_SPELLED_OUT.get(kind, kind), rest)))
    with _torch.autograd.profiler.record_function(f"meshlib:{title}"):
        return call()


def _flat(tensors: Any) -> list[Any]:
    """Return the tensors in lists of lists."""
    if isinstance(tensors, _torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]
